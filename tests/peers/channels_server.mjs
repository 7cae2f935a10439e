// The official express middleware with payment channels or the scheme upto, and the official facilitator in the same process or another one over HTTP.
//
//   PRIVATE_KEY=0x… RPC_URL=http://… PAY_TO=0x… OFFERS=batch-settlement,exact node channels_server.mjs
//   PRIVATE_KEY=0x… FACILITATOR_URL=http://… PAY_TO=0x… node channels_server.mjs
//
// The key is the channels' receiver authorizer, too. It sells POST /evaluate for at most $0.001 on Base Sepolia. Of a request's query,
// `charge` is what it really costs (in units), `fail` is the status with which the handler fails, and `delay` how long it takes (in ms).
// GET /stats says how often the handler ran, POST /forget loses all books, POST /claim claims what was charged and settles it.
import express from "express";
import { paymentMiddleware, x402ResourceServer } from "@x402/express";
import {
  BatchSettlementChannelManager,
  BatchSettlementEvmScheme as ServerScheme,
  InMemoryChannelStorage,
} from "@x402/evm/batch-settlement/server";
import { ExactEvmScheme as ExactServerScheme } from "@x402/evm/exact/server";
import { UptoEvmScheme as UptoServerScheme } from "@x402/evm/upto/server";
import { privateKeyToAccount } from "viem/accounts";
import { facilitatorClient, ready } from "./seller.mjs";

const { PRIVATE_KEY, PAY_TO, OFFERS = "batch-settlement" } = process.env;
const network = "eip155:84532";
const token = "0x036CbD53842c5426634e7929541eC2318f3dCF7e";

const account = privateKeyToAccount(PRIVATE_KEY);
const client = facilitatorClient();

// Its books can be lost.
let books = new InMemoryChannelStorage();
const storage = new Proxy({}, { get: (_, name) => (...args) => books[name](...args) });
const scheme = new ServerScheme(PAY_TO, { storage, receiverAuthorizerSigner: account });
const server = new x402ResourceServer(client).register(network, new ExactServerScheme()).register(network, new UptoServerScheme());
if (OFFERS.includes("batch-settlement")) server.register(network, scheme);
const accepts = OFFERS.split(",").map(scheme => ({ scheme, price: "$0.001", network, payTo: PAY_TO }));

let handled = 0;
const app = express();
app.get("/stats", (_request, response) => response.json({ handled }));
app.post("/forget", (_request, response) => {
  books = new InMemoryChannelStorage();
  response.json({});
});
app.post("/claim", async (_request, response) => {
  const manager = new BatchSettlementChannelManager({ scheme, facilitator: client, receiver: PAY_TO, token, network });
  response.json(await manager.claimAndSettle());
});
// Any method: the official clients ask with GET what a refund needs.
app.use(paymentMiddleware({ "/evaluate": { accepts } }, server));
app.post("/evaluate", async (request, response) => {
  handled += 1;
  const { charge, fail, delay = "1" } = request.query;
  await new Promise(done => setTimeout(done, Number(delay)));
  if (fail) return response.status(Number(fail)).json({ error: "the handler failed" });
  if (charge !== undefined) response.setHeader("Settlement-Overrides", JSON.stringify({ amount: charge }));
  response.json({ score: 1 });
});
const listener = app.listen(0, "127.0.0.1", () => ready(listener.address().port));
