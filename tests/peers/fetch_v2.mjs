// Buys one evaluation with the official client of x402 v2. See buyer.mjs for arguments and output.
import { wrapFetchWithPaymentFromConfig } from "@x402/fetch";
import { ExactEvmScheme } from "@x402/evm/exact/client";
import { account, buy } from "./buyer.mjs";

await buy(wrapFetchWithPaymentFromConfig(fetch, { schemes: [{ network: "eip155:*", client: new ExactEvmScheme(account) }] }));
