// Pays a price by permit of Permit2 (scheme exact), with the official client. Of the offers, it takes the one by permit.
//
// See buyer.mjs for arguments and output.
import { wrapFetchWithPayment, x402Client } from "@x402/fetch";
import { ExactEvmScheme } from "@x402/evm/exact/client";
import { account, buy } from "./buyer.mjs";

const byPermit = (_version, offers) => offers.find(offer => offer.extra?.assetTransferMethod === "permit2");
const client = new x402Client(byPermit).register("eip155:*", new ExactEvmScheme(account));
await buy(wrapFetchWithPayment(fetch, client));
