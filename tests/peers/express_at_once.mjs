// The official express middleware in front of a facilitator that checks the signature and settles at once: what the server itself
// takes, for benches/peers. Sells POST /evaluate for $0.001 on Base Sepolia; when ready it prints {"listening"} as one JSON line.
//
//   PAY_TO=0x… node express_at_once.mjs
import express from "express";
import { ExactEvmScheme } from "@x402/evm/exact/server";
import { authorizationTypes } from "@x402/evm";
import { paymentMiddleware, x402ResourceServer } from "@x402/express";
import { isAddressEqual, recoverTypedDataAddress } from "viem";

const network = "eip155:84532";

async function verify({ payload: { authorization, signature } }, { asset, extra }) {
  const payer = await recoverTypedDataAddress({
    domain: { name: extra.name, version: extra.version, chainId: 84532, verifyingContract: asset },
    types: authorizationTypes,
    primaryType: "TransferWithAuthorization",
    message: authorization,
    signature,
  });
  return { isValid: isAddressEqual(payer, authorization.from), payer };
}

const facilitator = {
  verify,
  settle: async ({ payload }) => ({
    success: true,
    payer: payload.authorization.from,
    transaction: `0x${"77".repeat(32)}`,
    network,
  }),
  getSupported: async () => ({ kinds: [{ x402Version: 2, scheme: "exact", network }], extensions: [], signers: {} }),
};

const accepts = { scheme: "exact", price: "$0.001", network, payTo: process.env.PAY_TO };
const server = new x402ResourceServer(facilitator).register(network, new ExactEvmScheme());
const app = express();
app.use(paymentMiddleware({ "POST /evaluate": { accepts } }, server));
app.post("/evaluate", (_request, response) => response.json({ score: 1 }));
const listener = app.listen(0, "127.0.0.1", () =>
  console.log(JSON.stringify({ listening: `127.0.0.1:${listener.address().port}` })),
);
