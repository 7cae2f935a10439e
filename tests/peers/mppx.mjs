// Buys one evaluation with mppx, whose client pays x402's scheme `exact` where no offer of its own protocol is. See buyer.mjs.
import { Mppx, evm } from "mppx/client";
import { account, buy } from "./buyer.mjs";

await buy(Mppx.create({ methods: [evm({ account })], polyfill: false }).fetch);
