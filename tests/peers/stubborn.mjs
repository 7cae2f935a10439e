// Pays one purchase after the other with the official client, over a fetch that sends a request again until it is answered.
//
//   PRIVATE_KEY=0x… node stubborn.mjs URL COUNT
//
// Prints one JSON line: for each purchase {score, status, body, payment}, `score` being what the right answer says.
import { wrapFetchWithPaymentFromConfig } from "@x402/fetch";
import { ExactEvmScheme } from "@x402/evm/exact/client";
import { privateKeyToAccount } from "viem/accounts";

const [url, count] = process.argv.slice(2);

/** What a seller answers that is away, or busy with the same payment. */
const comesLater = (status) => status === 409 || status === 429 || status >= 500;

async function untilAnswered(request) {
  for (;;) {
    try {
      const response = await fetch(request.clone());
      if (!comesLater(response.status)) return new Response(await response.arrayBuffer(), response);
      await response.arrayBuffer();
    } catch {
      // The seller was killed before its answer, or in the middle of it.
    }
    await new Promise((done) => setTimeout(done, 50));
  }
}

const client = new ExactEvmScheme(privateKeyToAccount(process.env.PRIVATE_KEY));
const paying = wrapFetchWithPaymentFromConfig(untilAnswered, { schemes: [{ network: "eip155:*", client }] });
const purchases = [];
for (let number = 0; number < Number(count); number++) {
  const score = number % 2;
  const response = await paying(url, { method: "POST", body: score ? "17 * 23 = 391" : "17 * 23 = 390" });
  const header = response.headers.get("payment-response");
  const payment = header && JSON.parse(Buffer.from(header, "base64").toString());
  purchases.push({ score, status: response.status, body: await response.text(), payment });
}
console.log(JSON.stringify(purchases));
process.exit();
