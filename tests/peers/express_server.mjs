// The official express middleware with the official facilitator in the same process, or with another one over HTTP.
//
//   FACILITATOR_URL=http://… PAY_TO=0x… FLOW=authorization node express_server.mjs
//   PRIVATE_KEY=0x… RPC_URL=http://… PAY_TO=0x… FLOW=authorization node express_server.mjs
//
// Sells POST /evaluate for $0.001 on Base Sepolia; GET /stats says how often its handler ran. When ready it prints
// {"listening"} as one JSON line. The key settles, and needs ether.
import express from "express";
import { x402Facilitator } from "@x402/core/facilitator";
import { HTTPFacilitatorClient } from "@x402/core/server";
import { toFacilitatorEvmSigner } from "@x402/evm";
import { ExactEvmScheme as FacilitatorScheme } from "@x402/evm/exact/facilitator";
import { ExactEvmScheme as ServerScheme } from "@x402/evm/exact/server";
import { paymentMiddleware, x402ResourceServer } from "@x402/express";
import { createWalletClient, http, publicActions } from "viem";
import { privateKeyToAccount } from "viem/accounts";
import { baseSepolia } from "viem/chains";

const { PRIVATE_KEY, RPC_URL, PAY_TO, FLOW, FACILITATOR_URL } = process.env;
const network = "eip155:84532";

function facilitatorHere() {
  const account = privateKeyToAccount(PRIVATE_KEY);
  const wallet = createWalletClient({ account, chain: baseSepolia, transport: http(RPC_URL), pollingInterval: 50 });
  const signer = toFacilitatorEvmSigner({ ...wallet.extend(publicActions), address: account.address });
  const facilitator = new x402Facilitator().register(network, new FacilitatorScheme(signer));
  return {
    verify: (payload, requirements) => facilitator.verify(payload, requirements),
    settle: (payload, requirements) => facilitator.settle(payload, requirements),
    getSupported: async () => facilitator.getSupported(),
  };
}

const facilitator = FACILITATOR_URL ? new HTTPFacilitatorClient({ url: FACILITATOR_URL }) : facilitatorHere();
const server = new x402ResourceServer(facilitator).register(network, new ServerScheme());

const accepts = { scheme: "exact", price: "$0.001", network, payTo: PAY_TO };
if (FLOW !== "authorization") accepts.extra = { paymentFlow: FLOW };

let handled = 0;
const app = express();
app.get("/stats", (_request, response) => response.json({ handled }));
app.use(paymentMiddleware({ "POST /evaluate": { accepts } }, server));
app.post("/evaluate", async (_request, response) => {
  handled += 1;
  await new Promise(done => setTimeout(done, 50));
  response.json({ score: 1 });
});
const listener = app.listen(0, "127.0.0.1", () => {
  console.log(JSON.stringify({ listening: `127.0.0.1:${listener.address().port}` }));
});
