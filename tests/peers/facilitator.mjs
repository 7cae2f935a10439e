// The official facilitator behind a small HTTP server, as its documentation has it.
//
//   PRIVATE_KEY=0x… RPC_URL=http://… node facilitator.mjs
//
// When ready it prints {"listening"} as one JSON line. The key settles, and needs ether.
import express from "express";
import { x402Facilitator } from "@x402/core/facilitator";
import { toFacilitatorEvmSigner } from "@x402/evm";
import { ExactEvmScheme } from "@x402/evm/exact/facilitator";
import { createWalletClient, http, publicActions } from "viem";
import { privateKeyToAccount } from "viem/accounts";
import { baseSepolia } from "viem/chains";

const { PRIVATE_KEY, RPC_URL } = process.env;
const account = privateKeyToAccount(PRIVATE_KEY);
const wallet = createWalletClient({ account, chain: baseSepolia, transport: http(RPC_URL), pollingInterval: 50 });
const signer = toFacilitatorEvmSigner({ ...wallet.extend(publicActions), address: account.address });
const facilitator = new x402Facilitator().register("eip155:84532", new ExactEvmScheme(signer));

const app = express();
app.use(express.json());
const answer = work => async (request, response) => {
  try {
    response.json(await work(request.body));
  } catch (error) {
    response.status(500).json({ error: String(error.message) });
  }
};
app.post("/verify", answer(asked => facilitator.verify(asked.paymentPayload, asked.paymentRequirements)));
app.post("/settle", answer(asked => facilitator.settle(asked.paymentPayload, asked.paymentRequirements)));
app.get("/supported", answer(async () => facilitator.getSupported()));
const listener = app.listen(0, "127.0.0.1", () => {
  console.log(JSON.stringify({ listening: `127.0.0.1:${listener.address().port}` }));
});
