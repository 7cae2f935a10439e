// The official hono middleware. See seller.mjs for what it sells and for the environment.
import { serve } from "@hono/node-server";
import { paymentMiddleware, x402ResourceServer } from "@x402/hono";
import { Hono } from "hono";
import { evaluate, ready, resourceServer, routes, stats } from "./seller.mjs";

const app = new Hono();
app.get("/stats", context => context.json(stats()));
app.use(paymentMiddleware(routes, resourceServer(x402ResourceServer)));
app.post("/evaluate", async context => context.json(await evaluate()));
serve({ fetch: app.fetch, hostname: "127.0.0.1", port: 0 }, ({ port }) => ready(port));
