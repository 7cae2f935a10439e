// The legacy express middleware of x402 v1, with the legacy facilitator on a port of its own (it is reached over HTTP only), or
// with another one.
//
//   FACILITATOR_URL=http://… PAY_TO=0x… node express_v1_server.mjs
//   PRIVATE_KEY=0x… RPC_URL=http://… PAY_TO=0x… node express_v1_server.mjs
//
// Sells POST /evaluate for $0.001 on Base Sepolia; GET /stats says how often its handler ran. When ready it prints
// {"listening"} as one JSON line. The key settles, and needs ether.
import express from "express";
import { createWalletClient, http, publicActions } from "viem";
import { privateKeyToAccount } from "viem/accounts";
import { baseSepolia } from "viem/chains";
import { settle, verify } from "x402/facilitator";
import { paymentMiddleware } from "x402-express";

const { PRIVATE_KEY, RPC_URL, PAY_TO, FACILITATOR_URL } = process.env;

const listen = app =>
  new Promise(done => {
    const listener = app.listen(0, "127.0.0.1", () => done(`127.0.0.1:${listener.address().port}`));
  });

async function facilitatorHere() {
  const account = privateKeyToAccount(PRIVATE_KEY);
  const transport = http(RPC_URL);
  const wallet = createWalletClient({ account, chain: baseSepolia, transport, pollingInterval: 50 }).extend(publicActions);
  const facilitator = express();
  facilitator.use(express.json());
  for (const [path, work] of Object.entries({ "/verify": verify, "/settle": settle })) {
    facilitator.post(path, async ({ body }, response) => {
      response.json(await work(wallet, body.paymentPayload, body.paymentRequirements));
    });
  }
  return `http://${await listen(facilitator)}`;
}

const url = FACILITATOR_URL ?? (await facilitatorHere());
let handled = 0;
const app = express();
app.get("/stats", (_request, response) => response.json({ handled }));
app.use(paymentMiddleware(PAY_TO, { "POST /evaluate": { price: "$0.001", network: "base-sepolia" } }, { url }));
app.post("/evaluate", async (_request, response) => {
  handled += 1;
  response.json({ score: 1 });
});
console.log(JSON.stringify({ listening: await listen(app) }));
