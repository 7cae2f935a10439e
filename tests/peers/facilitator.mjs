// The official facilitator behind a small HTTP server, as its documentation has it.
//
//   PRIVATE_KEY=0x… RPC_URL=http://… node facilitator.mjs
//
// When ready it prints {"listening"} as one JSON line. The key settles, and needs ether.
import express from "express";
import { facilitatorHere, ready } from "./seller.mjs";

const facilitator = facilitatorHere();
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
const listener = app.listen(0, "127.0.0.1", () => ready(listener.address().port));
