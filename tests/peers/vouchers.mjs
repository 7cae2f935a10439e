// Pays with vouchers (scheme batch-settlement), with the official client: one deposit, then vouchers, a price below the maximum, two
// requests at once, a client that lost its state, a refund, and a deposit after it.
//
//   PRIVATE_KEY=0x… RPC_URL=http://… node vouchers.mjs URL
//
// With ALONE=1 the two requests come one after the other: the official servers refuse a second one while the first is worked for.
//
// Prints one JSON line per step: {step, status, body, payment}, `payment` being the decoded PAYMENT-RESPONSE, or null.
import { wrapFetchWithPaymentFromConfig } from "@x402/fetch";
import { toClientEvmSigner } from "@x402/evm";
import { BatchSettlementEvmScheme, InMemoryClientChannelStorage } from "@x402/evm/batch-settlement/client";
import { createPublicClient, http } from "viem";
import { baseSepolia } from "viem/chains";
import { account } from "./buyer.mjs";

const url = process.argv[2];
const chain = createPublicClient({ chain: baseSepolia, transport: http(process.env.RPC_URL) });
const signer = toClientEvmSigner(account, chain);

function client() {
  const scheme = new BatchSettlementEvmScheme(signer, { storage: new InMemoryClientChannelStorage() });
  const paying = wrapFetchWithPaymentFromConfig(fetch, { schemes: [{ network: "eip155:*", client: scheme }] });
  return { scheme, paying };
}

function report(step, status, body, payment) {
  console.log(JSON.stringify({ step, status, body, payment }));
}

async function buy({ paying }, step, task, query = "") {
  const response = await paying(url + query, { method: "POST", body: task });
  const header = response.headers.get("payment-response");
  report(step, response.status, await response.text(), header && JSON.parse(Buffer.from(header, "base64").toString()));
}

const buyer = client();
await buy(buyer, "deposit", "one");
await buy(buyer, "voucher", "two");
await buy(buyer, "cheaper", "cheap", "?charge=300");
await buy(buyer, "after", "three");
const fourth = buy(buyer, "together", "four");
if (process.env.ALONE) await fourth;
await Promise.all([fourth, buy(buyer, "together", "five")]);
const forgetful = client();
await buy(forgetful, "recovered", "six");
const refund = await forgetful.scheme.refund(url);
report("refund", 200, "", refund);
await buy(forgetful, "again", "seven");
