// Pays COUNT requests with vouchers (scheme batch-settlement), with the official client, one after the other: it has one channel to a seller.
//
//   PRIVATE_KEY=0x… RPC_URL=http://… node lanes.mjs URL COUNT
//
// Prints how many milliseconds they took, without the first request, which makes the deposit.
import { wrapFetchWithPaymentFromConfig } from "@x402/fetch";
import { toClientEvmSigner } from "@x402/evm";
import { BatchSettlementEvmScheme, InMemoryClientChannelStorage } from "@x402/evm/batch-settlement/client";
import { createPublicClient, http } from "viem";
import { baseSepolia } from "viem/chains";
import { account } from "./buyer.mjs";

const [url, count] = process.argv.slice(2);
const chain = createPublicClient({ chain: baseSepolia, transport: http(process.env.RPC_URL) });
const storage = new InMemoryClientChannelStorage();
const scheme = new BatchSettlementEvmScheme(toClientEvmSigner(account, chain), { storage });
const paying = wrapFetchWithPaymentFromConfig(fetch, { schemes: [{ network: "eip155:*", client: scheme }] });

async function buy() {
  const response = await paying(url, { method: "POST", body: "" });
  if (response.status !== 200) throw new Error(`${response.status} ${await response.text()}`);
  await response.text();
}

await buy();
const started = performance.now();
for (let n = 0; n < Number(count); n++) await buy();
console.log(Math.round(performance.now() - started));
