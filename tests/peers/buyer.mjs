// What the buyers share: the arguments and what they print.
//
//   PRIVATE_KEY=0x… node fetch_v2.mjs URL
//
// POSTs the evaluation in the environment's TASK to URL and prints {status, body, payment} as one JSON line, `payment`
// being the decoded payment response, or null.
import { privateKeyToAccount } from "viem/accounts";

export const account = privateKeyToAccount(process.env.PRIVATE_KEY);

export async function buy(payingFetch) {
  const response = await payingFetch(process.argv[2], {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: process.env.TASK,
  });
  const header = response.headers.get("payment-response") ?? response.headers.get("x-payment-response");
  const payment = header && JSON.parse(Buffer.from(header, "base64").toString());
  console.log(JSON.stringify({ status: response.status, body: await response.text(), payment }));
}
