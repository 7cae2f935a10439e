// Presents the same payments in the same way to whatever server sells at URL.
//
//   PRIVATE_KEY=0x… RPC_URL=http://… TASK=… node compare.mjs URL
//
// First 8 copies of one payment at once, then 10 payments at once, each with a nonce of its own, all signed by the official
// client. Prints {"copies": {…}, "distinct": {…}} as one JSON line, each with `sent`, `handlers` (how often the handler ran,
// as GET /stats says), `ok` (how many answers were 200), `later` (503: to be presented again) and `settled` (transfers to the
// payee on the chain).
import { x402Client, x402HTTPClient } from "@x402/core/client";
import { ExactEvmScheme } from "@x402/evm/exact/client";
import { createPublicClient, http, parseAbiItem } from "viem";
import { account } from "./buyer.mjs";

const url = process.argv[2];
const chain = createPublicClient({ transport: http(process.env.RPC_URL) });
const client = new x402HTTPClient(new x402Client().register("eip155:*", new ExactEvmScheme(account)));

const post = headers =>
  fetch(url, { method: "POST", headers: { "content-type": "application/json", ...headers }, body: process.env.TASK });

const demand = await post({});
const required = client.getPaymentRequiredResponse(name => demand.headers.get(name), await demand.json());
const [{ asset, payTo }] = required.accepts;
const sign = async () => client.encodePaymentSignatureHeader(await client.createPaymentPayload(required));

async function handlers() {
  const stats = await fetch(new URL("/stats", url));
  return (await stats.json()).handled;
}

async function transfers() {
  const event = parseAbiItem("event Transfer(address indexed from, address indexed to, uint256 value)");
  const args = { from: account.address, to: payTo };
  return (await chain.getLogs({ address: asset, event, args, fromBlock: 0n })).length;
}

async function present(payments) {
  const before = [await handlers(), await transfers()];
  const answers = await Promise.all(payments.map(headers => post(headers)));
  const [ok, later] = [200, 503].map(status => answers.filter(answer => answer.status === status).length);
  const [ran, settled] = [(await handlers()) - before[0], (await transfers()) - before[1]];
  return { sent: payments.length, handlers: ran, ok, later, settled };
}

const copies = await present(Array(8).fill(await sign()));
const distinct = await present(await Promise.all(Array.from({ length: 10 }, sign)));
console.log(JSON.stringify({ copies, distinct }));
