// Pays for this page's address from a wallet in the browser, once.
//
// 1. The wallet signs one EIP-3009 authorization: amount, payee, token and window are those of the offer in this page.
// 2. It is kept in sessionStorage, and presented: the same request again, by fetch, with PAYMENT-SIGNATURE.
// 3. Until the whole answer is here, the button presents that same authorization, which can move money only once.
//    Another one is signed only after the chain has shown that the first one expired unused.
'use strict';
(() => {
  const element = (id) => document.getElementById(id);
  const required = JSON.parse(element('payment-required').textContent);
  const here = location.origin + location.pathname + location.search;
  const button = element('pay');
  const chosen = () => document.querySelector('input[name="offer"]:checked');
  const chainOf = (offer) => Number(offer.network.replace('eip155:', ''));

  /** What a wallet is told of a chain that it does not know (EIP-3085). */
  const describe = (chainName, rpc, explorer) => ({ chainName, rpcUrls: [rpc], blockExplorerUrls: [explorer],
    nativeCurrency: { name: 'Ether', symbol: 'ETH', decimals: 18 } });
  const CHAINS = {
    8453: describe('Base', 'https://mainnet.base.org', 'https://basescan.org'),
    84532: describe('Base Sepolia', 'https://sepolia.base.org', 'https://sepolia.basescan.org'),
  };

  /** Tells the person. All that is shown is text, never markup. */
  const say = (kind, text) => Object.assign(element('status'), { className: kind, textContent: text });
  /** An error whose message is meant for the person. */
  class Told extends Error {}

  // The payment that was signed and is not answered yet.
  const place = `x402 payment for ${here}`;
  const kept = () => json(sessionStorage.getItem(place));
  const forget = () => sessionStorage.removeItem(place);

  // The wallet (EIP-1193), found as window.ethereum or by EIP-6963.
  let announced;
  addEventListener('eip6963:announceProvider', (event) => { announced ??= event.detail?.provider; });
  dispatchEvent(new Event('eip6963:requestProvider'));
  const ask = async (method, ...params) => {
    const wallet = window.ethereum ?? announced;
    if (!wallet) throw new Told('There is no wallet in this browser. Install a wallet extension and reload the page, or'
      + ' open it in the browser of a wallet app. A program needs no wallet extension: see below.');
    return wallet.request({ method, params });
  };
  const word = (hex) => hex.slice(2).toLowerCase().padStart(64, '0');
  const random = () => Array.from(crypto.getRandomValues(new Uint8Array(32)), (byte) => byte + 256)
    .reduce((hex, byte) => hex + byte.toString(16).slice(1), '0x');

  async function goTo(chain) {
    const chainId = `0x${chain.toString(16)}`;
    const isThere = async () => Number(await ask('eth_chainId')) === chain;
    if (await isThere()) return;
    say('busy', 'Confirm the change of network in your wallet.');
    try {
      await ask('wallet_switchEthereumChain', { chainId });
    } catch (error) {
      const isUnknown = (error.data?.originalError?.code ?? error.code) === 4902;
      if (!isUnknown || !CHAINS[chain]) throw error;
      await ask('wallet_addEthereumChain', { chainId, ...CHAINS[chain] });
      if (!await isThere()) await ask('wallet_switchEthereumChain', { chainId });
    }
    if (!await isThere()) throw new Told(`Your wallet is on another network; switch it to chain ${chain}.`);
  }

  /** What became of an authorization: 'used', 'void' (unused as of a block past its end), or 'open'. */
  async function fate({ offer, from, nonce, validBefore }) {
    try {
      await goTo(chainOf(offer));
      const block = await ask('eth_getBlockByNumber', 'latest', false);
      const state = { to: offer.asset, data: `0xe94a0102${word(from)}${word(nonce)}` }; // authorizationState
      if (BigInt(await ask('eth_call', state, block.number)) !== 0n) return 'used';
      return Number(block.timestamp) >= validBefore ? 'void' : 'open';
    } catch {
      return 'open';
    }
  }

  async function sign(offer) {
    say('busy', 'Connect your wallet.');
    const [from] = await ask('eth_requestAccounts');
    if (!from) throw new Told('The wallet gave no account.');
    await goTo(chainOf(offer));
    const balanceOf = { to: offer.asset, data: `0x70a08231${word(from)}` };
    // A wallet that cannot tell is no reason to stop.
    const balance = await ask('eth_call', balanceOf, 'latest').then(BigInt).catch(() => null);
    if (balance !== null && balance < BigInt(offer.amount)) {
      throw new Told(`${from} does not hold enough of the token on this network. Nothing was signed.`);
    }
    const now = Math.floor(Date.now() / 1000);
    const validBefore = now + offer.maxTimeoutSeconds;
    const message = { from, to: offer.payTo, value: offer.amount, validAfter: String(now - 600),
      validBefore: String(validBefore), nonce: random() };
    const fields = (text) => text.split(', ').map((field) => field.split(' ')).map(([type, name]) => ({ type, name }));
    const typedData = {
      domain: { name: offer.extra.name, version: offer.extra.version,
        chainId: chainOf(offer), verifyingContract: offer.asset },
      primaryType: 'TransferWithAuthorization',
      types: {
        EIP712Domain: fields('string name, string version, uint256 chainId, address verifyingContract'),
        TransferWithAuthorization: fields('address from, address to, uint256 value, uint256 validAfter, '
          + 'uint256 validBefore, bytes32 nonce'),
      },
      message,
    };
    say('busy', 'Confirm the payment in your wallet.');
    const signature = await ask('eth_signTypedData_v4', from, JSON.stringify(typedData));
    const extensions = structuredClone(required.extensions);
    // A seller that knows payments by ids gives the answer again to whoever has the id.
    if (extensions?.['payment-identifier']) extensions['payment-identifier'].info.id = `pay_${random().slice(2)}`;
    const payload = { x402Version: 2, resource: required.resource, accepted: offer,
      payload: { signature, authorization: message }, extensions };
    return { header: encode(payload), offer, from, nonce: message.nonce, validBefore };
  }

  async function present(payment) {
    say('busy', 'Paying: the seller works and settles. This takes a moment.');
    const again = 'Your payment is kept in this tab: to ask again presents the same one, which is never paid twice.';
    const request = { headers: { 'PAYMENT-SIGNATURE': payment.header }, cache: 'no-store', redirect: 'manual' };
    let response, body;
    try {
      response = await fetch(here, request);
      body = await response.blob();
    } catch {
      throw new Told(`The answer did not arrive. ${again}`);
    }
    const receipt = decode(response.headers.get('PAYMENT-RESPONSE'));
    if (response.ok) {
      const explorer = CHAINS[chainOf(payment.offer)]?.blockExplorerUrls[0];
      await showAnswer(body, receipt, payment, explorer);
      forget();
      const money = receipt?.transaction ? 'Paid and settled.' : 'Paid; the transfer follows.';
      return say('done', receipt ? money : 'Answered, without a receipt.');
    }
    const text = await body.text();
    const said = json(text) ?? { detail: text.slice(0, 300) };
    const code = decode(response.headers.get('PAYMENT-REQUIRED'))?.error ?? said.error ?? response.statusText;
    const reason = `${response.status || 'a redirect'} ${code}`.trim();
    const why = said.detail ?? `${said.error ?? ''}`.replace(code, '').replace(/^: /, '');
    if (receipt?.success) throw new Told(`Paid, but the work failed (${reason}). To ask again costs nothing more.`);
    if (response.status === 409 && (said.transaction || payment.used)) {
      forget();
      throw new Told(`This was paid (${said.transaction ?? reason}) and its answer is not kept any more. Ask the`
        + ' seller for it: to pay here again would be another purchase.');
    }
    const isOpen = response.status >= 500 || response.headers.has('Retry-After');
    if (isOpen) throw new Told(`No answer yet (${reason}).\n${why}\n${again}`);
    const end = new Date(payment.validBefore * 1000).toLocaleTimeString();
    throw new Told(`The seller declined (${reason}).\n${why}\nWhat you signed ends at ${end}; if it is unused then,`
      + ' you can sign another payment here.');
  }

  const label = () => {
    const pay = `Pay ${chosen().dataset.price}${element('answer').hidden ? '' : ' again'}`;
    button.textContent = kept() ? 'Ask again' : pay;
  };

  async function press() {
    button.disabled = true;
    try {
      let payment = kept();
      if (payment && Date.now() / 1000 >= payment.validBefore) {
        const became = await fate(payment);
        payment.used = became === 'used';
        if (became === 'void') {
          forget();
          throw new Told('What you signed before ended unused: nothing was paid with it. You can pay now.');
        }
      }
      if (!payment) {
        payment = await sign(required.accepts[chosen().value]);
        sessionStorage.setItem(place, JSON.stringify(payment));
      }
      await present(payment);
    } catch (error) {
      const known = { 4001: 'You declined in the wallet. Nothing was paid.',
        '-32002': 'A question is open in your wallet already: answer it there.' }[error?.code];
      say('problem', error instanceof Told ? error.message : known ?? `The wallet said: ${error?.message ?? error}`);
    } finally {
      button.disabled = false;
      if (document.activeElement === document.body) button.focus();
      label();
    }
  }

  element('address').textContent = here;
  const quoted = here.replace(/['"\\`]/g, (char) => `%${char.charCodeAt(0).toString(16)}`);
  document.querySelectorAll('.here').forEach((span) => { span.textContent = quoted; });
  if (!button) return;
  button.hidden = false;
  try {
    if (kept()) say('problem', 'A payment was signed here and not answered yet. To ask again presents the same one.');
    label();
    document.querySelectorAll('input[name="offer"]').forEach((radio) => radio.addEventListener('change', label));
    button.addEventListener('click', press);
  } catch {
    button.disabled = true;
    say('problem', 'This browser keeps nothing for this page, so that a payment could be lost. Allow site data, or pay'
      + ' by a program.');
  }
})();
