// What the official bazaar package makes of ours.
//
//   node bazaar.mjs declared '{"extensions": {…}, "config": {…}, "method": "POST"}'
//   node bazaar.mjs checked '[[schema, info], …]'
//   node bazaar.mjs settled '{"paymentPayload": {…}, "paymentRequirements": {…}}'
//   node bazaar.mjs list URL '{"type": "http", "limit": 1}'
//
// Prints one JSON line. `declared`: whether the official package would declare the route in the same words (`same`), and what its
// validators say of ours; `checked`: for each pair whether the schema describes the value; `settled`: what an official facilitator
// would catalogue; `list`: what the official client lists at that facilitator.
import { isDeepStrictEqual } from "node:util";
import { HTTPFacilitatorClient } from "@x402/core/server";
import {
  bazaarResourceServerExtension,
  declareDiscoveryExtension,
  extractDiscoveryInfo,
  validateDiscoveryExtension,
  validateDiscoveryExtensionSpec,
  withBazaar,
} from "@x402/extensions/bazaar";

const [what, ...args] = process.argv.slice(2);
const answers = {
  declared([asked]) {
    const { extensions, config, method } = JSON.parse(asked);
    const ours = extensions.bazaar;
    const theirs = bazaarResourceServerExtension.enrichDeclaration(
      declareDiscoveryExtension(config).bazaar,
      { method, adapter: { getPath: () => "/evaluate" }, routePattern: "/evaluate" },
    );
    return {
      same: isDeepStrictEqual(ours, JSON.parse(JSON.stringify(theirs))),
      theirs,
      valid: validateDiscoveryExtension(ours),
      spec: validateDiscoveryExtensionSpec(ours),
    };
  },
  checked([pairs]) {
    return JSON.parse(pairs).map(([schema, info]) => validateDiscoveryExtension({ schema, info }).valid);
  },
  settled([asked]) {
    const { paymentPayload, paymentRequirements } = JSON.parse(asked);
    return extractDiscoveryInfo(paymentPayload, paymentRequirements);
  },
  async list([url, params]) {
    const client = withBazaar(new HTTPFacilitatorClient({ url }));
    return client.extensions.bazaar.listResources(JSON.parse(params));
  },
};
console.log(JSON.stringify(await answers[what](args)));
