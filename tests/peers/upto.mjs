// Pays at most a price (scheme upto), with the official client: all of it, a part, and nothing.
//
//   PRIVATE_KEY=0x… node upto.mjs URL
//
// Prints one JSON line per request: {charge, status, body, payment}, `payment` being the decoded PAYMENT-RESPONSE, or null.
import { wrapFetchWithPaymentFromConfig } from "@x402/fetch";
import { UptoEvmScheme } from "@x402/evm/upto/client";
import { account } from "./buyer.mjs";

const client = new UptoEvmScheme(account);
const paying = wrapFetchWithPaymentFromConfig(fetch, { schemes: [{ network: "eip155:*", client }] });
for (const charge of ["1000", "300", "0"]) {
  const response = await paying(`${process.argv[2]}?charge=${charge}`, { method: "POST", body: charge });
  const header = response.headers.get("payment-response");
  const payment = header && JSON.parse(Buffer.from(header, "base64").toString());
  console.log(JSON.stringify({ charge, status: response.status, body: await response.text(), payment }));
}
