// The official express middleware. See seller.mjs for what it sells and for the environment.
import express from "express";
import { paymentMiddleware, x402ResourceServer } from "@x402/express";
import { evaluate, ready, resourceServer, routes, stats } from "./seller.mjs";

const app = express();
app.get("/stats", (_request, response) => response.json(stats()));
app.use(paymentMiddleware(routes, resourceServer(x402ResourceServer)));
app.post("/evaluate", async (_request, response) => response.json(await evaluate()));
const listener = app.listen(0, "127.0.0.1", () => ready(listener.address().port));
