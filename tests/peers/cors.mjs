// Pays with the official client, from a page on another origin in Chromium: its requests are made, and its answers read, as far as the
// browser lets scripts of that page.
//
//   PRIVATE_KEY=0x… BROWSER=/usr/bin/chromium PROFILE=/tmp/… node cors.mjs PAGE URL…
//
// Posts JSON to each URL and prints [{status, body, headers}] as one JSON line.
import puppeteer from "puppeteer-core";
import { wrapFetchWithPaymentFromConfig } from "@x402/fetch";
import { ExactEvmScheme } from "@x402/evm/exact/client";
import { privateKeyToAccount } from "viem/accounts";

const [from, ...urls] = process.argv.slice(2);
const browser = await puppeteer.launch({
  executablePath: process.env.BROWSER,
  userDataDir: process.env.PROFILE,
  pipe: true,
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
});
const page = await browser.newPage();
await page.goto(from);

async function inThePage(request) {
  const { url, method } = request;
  const asked = { url, method, headers: Object.fromEntries(request.headers), body: await request.text() };
  const { status, headers, body } = await page.evaluate(async ({ url, ...init }) => {
    const response = await fetch(url, init);
    return { status: response.status, headers: [...response.headers], body: await response.text() };
  }, asked);
  return new Response(body, { status, headers });
}

const client = new ExactEvmScheme(privateKeyToAccount(process.env.PRIVATE_KEY));
const paying = wrapFetchWithPaymentFromConfig(inThePage, { schemes: [{ network: "eip155:*", client }] });
const answers = [];
for (const url of urls) {
  const response = await paying(url, { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });
  answers.push({ status: response.status, body: await response.text(), headers: Object.fromEntries(response.headers) });
}
console.log(JSON.stringify(answers));
await browser.close();
