// Buys one evaluation with the legacy client of x402 v1. See buyer.mjs for arguments and output.
import { wrapFetchWithPayment } from "x402-fetch";
import { account, buy } from "./buyer.mjs";

await buy(wrapFetchWithPayment(fetch, account));
