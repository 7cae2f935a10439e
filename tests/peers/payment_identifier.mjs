// What the official extension package makes of ours.
//
//   node payment_identifier.mjs OFFERED GIVEN
//
// OFFERED are the extensions of a 402, GIVEN those of a payment for it, both as JSON. Prints one JSON line: `offered`, whether
// the official package would offer payment identifiers in the same words; `id`, the one in GIVEN if it is valid;
// `given`, OFFERED with an id of the official package's.
import { isDeepStrictEqual } from "node:util";
import {
  PAYMENT_IDENTIFIER,
  appendPaymentIdentifierToExtensions,
  declarePaymentIdentifierExtension,
  extractAndValidatePaymentIdentifier,
} from "@x402/extensions/payment-identifier";

const [offered, given] = process.argv.slice(2).map(json => JSON.parse(json));
const { id, validation } = extractAndValidatePaymentIdentifier({ extensions: given });
console.log(JSON.stringify({
  offered: isDeepStrictEqual(offered[PAYMENT_IDENTIFIER], declarePaymentIdentifierExtension(false)),
  id: validation.valid ? id : null,
  given: appendPaymentIdentifierToExtensions(structuredClone(offered)),
}));
