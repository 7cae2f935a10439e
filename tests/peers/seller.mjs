// What the sellers share: who settles for them, what they charge, and how they say that they are ready.
//
//   FACILITATOR_URL=http://… PAY_TO=0x… FLOW=authorization node hono_server.mjs
//   PRIVATE_KEY=0x… RPC_URL=http://… PAY_TO=0x… FLOW=authorization node hono_server.mjs
//
// They sell POST /evaluate for $0.001 on Base Sepolia; GET /stats says how often the handler ran. The facilitator is the
// official one in the same process, whose key settles and needs ether, or another one over HTTP.
import { x402Facilitator } from "@x402/core/facilitator";
import { HTTPFacilitatorClient } from "@x402/core/server";
import { toFacilitatorEvmSigner } from "@x402/evm";
import { BatchSettlementEvmScheme as ChannelsFacilitatorScheme } from "@x402/evm/batch-settlement/facilitator";
import { ExactEvmScheme as FacilitatorScheme } from "@x402/evm/exact/facilitator";
import { ExactEvmScheme as ServerScheme } from "@x402/evm/exact/server";
import { UptoEvmScheme as UptoFacilitatorScheme } from "@x402/evm/upto/facilitator";
import { createWalletClient, http, publicActions } from "viem";
import { privateKeyToAccount } from "viem/accounts";
import { baseSepolia } from "viem/chains";

const { PRIVATE_KEY, RPC_URL, PAY_TO, FLOW, FACILITATOR_URL } = process.env;
const network = "eip155:84532";

// The official facilitator, settling with the environment's key.
export function facilitatorHere() {
  const account = privateKeyToAccount(PRIVATE_KEY);
  const wallet = createWalletClient({ account, chain: baseSepolia, transport: http(RPC_URL), pollingInterval: 50 });
  const signer = toFacilitatorEvmSigner({ ...wallet.extend(publicActions), address: account.address });
  return new x402Facilitator()
    .register(network, new FacilitatorScheme(signer))
    .register(network, new UptoFacilitatorScheme(signer))
    .register(network, new ChannelsFacilitatorScheme(signer));
}

export function facilitatorClient() {
  if (FACILITATOR_URL) return new HTTPFacilitatorClient({ url: FACILITATOR_URL });
  const facilitator = facilitatorHere();
  return {
    verify: (payload, requirements) => facilitator.verify(payload, requirements),
    settle: (payload, requirements) => facilitator.settle(payload, requirements),
    getSupported: async () => facilitator.getSupported(),
  };
}

// The resource server of a package's middleware, given the package's own class.
export const resourceServer = Server => new Server(facilitatorClient()).register(network, new ServerScheme());

const accepts = { scheme: "exact", price: "$0.001", network, payTo: PAY_TO };
if (FLOW && FLOW !== "authorization") accepts.extra = { paymentFlow: FLOW };
export const routes = { "POST /evaluate": { accepts } };

let handled = 0;
export const stats = () => ({ handled });

export async function evaluate() {
  handled += 1;
  await new Promise(done => setTimeout(done, 50));
  return { score: 1 };
}

export const ready = port => console.log(JSON.stringify({ listening: `127.0.0.1:${port}` }));
