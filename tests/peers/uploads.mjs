// Pays for uploads over pooled connections, with the official client: over fetch, or over Node's own http.
//
//   PRIVATE_KEY=0x… node uploads.mjs fetch|http URL TIMES SIZE…
//
// Posts each size to URL/length and to URL/blind, TIMES times, and prints {failures} as one JSON line.
import http from "node:http";
import { wrapFetchWithPaymentFromConfig } from "@x402/fetch";
import { ExactEvmScheme } from "@x402/evm/exact/client";
import { privateKeyToAccount } from "viem/accounts";

const [kind, url, times, ...sizes] = process.argv.slice(2);
const agent = new http.Agent({ keepAlive: true });

/** As much of fetch as the client needs, over Node's http. */
async function overHttp(request) {
  const body = Buffer.from(await request.arrayBuffer());
  return new Promise((done, failed) => {
    const headers = { ...Object.fromEntries(request.headers), "content-length": body.length };
    const sent = http.request(request.url, { method: request.method, headers, agent }, (answer) => {
      const chunks = [];
      answer.on("data", (chunk) => chunks.push(chunk));
      answer.on("end", () => done(new Response(Buffer.concat(chunks), { status: answer.statusCode, headers: answer.headers })));
      answer.on("error", failed);
    });
    sent.on("error", failed);
    sent.end(body);
  });
}

const client = new ExactEvmScheme(privateKeyToAccount(process.env.PRIVATE_KEY));
const paying = wrapFetchWithPaymentFromConfig(kind === "http" ? overHttp : fetch, { schemes: [{ network: "eip155:*", client }] });
const failures = [];
for (const size of sizes.map(Number)) {
  for (let time = 0; time < Number(times); time++) {
    for (const path of ["length", "blind"]) {
      const failed = (why) => failures.push(`${size} bytes to ${path}: ${why}`);
      try {
        const response = await paying(`${url}/${path}`, { method: "POST", body: Buffer.alloc(size, "x") });
        const text = await response.text();
        if (response.status !== 200 || text !== (path === "length" ? String(size) : "well done")) failed(`${response.status} ${text}`);
      } catch (error) {
        failed(`${error} ${error.cause ?? ""}`);
      }
    }
  }
}
console.log(JSON.stringify({ failures }));
process.exit();
