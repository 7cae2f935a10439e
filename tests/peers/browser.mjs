// A person with a browser and a wallet. Reads one command per line, does it, and answers with a line that says what the page
// shows then, what went wrong in it, and what the wallet was asked since the last line.
//
// BROWSER: Chromium's program; PROFILE: its directory; PRIVATE_KEY: the wallet's key; RPC_URL: the node of chain 84532.
import { createInterface } from 'node:readline';
import axe from 'axe-core';
import puppeteer from 'puppeteer-core';
import { privateKeyToAccount } from 'viem/accounts';

const account = privateKeyToAccount(process.env.PRIVATE_KEY);
const CHAIN = '0x14a34';

// What the wallet is like; the command "wallet" changes it.
const wallet = { isThere: true, chain: CHAIN, knows: [CHAIN], declines: [] };
let asked = [];

async function node(method, params) {
  const body = JSON.stringify({ jsonrpc: '2.0', id: 1, method, params });
  const response = await fetch(process.env.RPC_URL, { method: 'POST', headers: { 'content-type': 'application/json' }, body });
  const { result, error } = await response.json();
  if (error) throw error;
  return result;
}

/** Like an extension: it minds on which chain it is, and signs only for that one. */
async function request({ method, params = [] }) {
  asked.push({ method, params });
  if (wallet.declines.includes(method)) throw { code: 4001, message: 'User rejected the request.' };
  switch (method) {
    case 'eth_requestAccounts':
      return [account.address];
    case 'eth_chainId':
      return wallet.chain;
    case 'wallet_switchEthereumChain':
      if (!wallet.knows.includes(params[0].chainId)) throw { code: 4902, message: 'Unrecognized chain ID.' };
      wallet.chain = params[0].chainId;
      return null;
    case 'wallet_addEthereumChain':
      wallet.knows.push(params[0].chainId);
      return null;
    case 'eth_signTypedData_v4': {
      const { domain, types, primaryType, message } = JSON.parse(params[1]);
      if (domain.chainId !== Number(wallet.chain)) throw { code: -32603, message: 'chainId is not the active chain' };
      if (params[0] !== account.address) throw { code: 4100, message: 'not my account' };
      const { EIP712Domain: _, ...own } = types;
      for (const { name, type } of own[primaryType]) if (type === 'uint256') message[name] = BigInt(message[name]);
      return account.signTypedData({ domain, types: own, primaryType, message });
    }
    default:
      if (wallet.chain !== CHAIN) throw { code: -32603, message: 'no node for that chain' };
      return node(method, params);
  }
}

const browser = await puppeteer.launch({
  executablePath: process.env.BROWSER,
  userDataDir: process.env.PROFILE,
  // The browser ends when this process does.
  pipe: true,
  args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--host-resolver-rules=MAP essays.example 127.0.0.1'],
});
const page = await browser.newPage();
await page.setViewport({ width: 1100, height: 800 });

let whole = null;
let wrong = [];
page.on('pageerror', (error) => wrong.push(String(error)));
page.on('console', (message) => {
  // Every 402 is one of the first kind; the second is what a frame without rights is for.
  const isAnswer = /^(Failed to load resource|Blocked script execution in 'blob:)/.test(message.text());
  if (['error', 'warn'].includes(message.type()) && !isAnswer) wrong.push(message.text());
});
page.on('dialog', (dialog) => {
  wrong.push(`a dialog: ${dialog.message()}`);
  dialog.dismiss();
});

// Whether there is one, or it is one that 'announced' itself (EIP-6963) only.
await page.exposeFunction('walletIsThere', () => wallet.isThere);
await page.exposeFunction('walletRequest', (asks) => request(asks).then((result) => ({ result }), (error) => ({ error })));
await page.evaluateOnNewDocument(() => {
  // Where the browser's clock stands, ahead of the machine's.
  const now = Date.now;
  Date.now = () => now() + Number(sessionStorage.getItem('ahead') ?? 0);
  const provider = {
    request: async (asks) => {
      const { result, error } = await window.walletRequest(asks);
      if (error) throw Object.assign(new Error(error.message), error);
      return result;
    },
  };
  const detail = { info: { name: 'A wallet' }, provider };
  const announce = () => window.dispatchEvent(new CustomEvent('eip6963:announceProvider', { detail }));
  window.walletHasCome = window.walletIsThere().then((isThere) => {
    if (isThere === 'announced') {
      // Whether it or the page comes first: it speaks for itself, and again to whoever asks.
      window.addEventListener('eip6963:requestProvider', announce);
      announce();
    } else if (isThere) window.ethereum = provider;
  });
});

const commands = {
  wallet: ({ set }) => Object.assign(wallet, set),
  open: ({ url }) => page.goto(url),
  reload: () => page.reload(),
  ahead: ({ seconds }) => page.evaluate((ahead) => sessionStorage.setItem('ahead', ahead), seconds * 1000),
  choose: ({ offer }) => page.click(`input[name="offer"][value="${offer}"]`),
  press: async () => {
    await page.evaluate(() => window.walletHasCome);
    await page.focus('#pay');
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => !document.getElementById('pay').disabled && document.getElementById('status').className !== 'busy');
  },
  read: async () => (whole = await page.evaluate(() => document.body.innerText)),
  picture: async ({ file, width, height, dark, whole }) => {
    await page.setViewport({ width, height });
    await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: dark ? 'dark' : 'light' }]);
    await page.evaluate(() => window.scrollTo(0, 0));
    // What keeps people out, by the rules of WCAG that a program can check.
    await page.evaluate(axe.source);
    const { violations } = await page.evaluate(() => globalThis.axe.run(document, { iframes: false }));
    wrong.push(...violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(' ')}`));
    await page.screenshot({ path: file, fullPage: whole ?? true });
  },
};

/** What a person sees; null for what is not there or not visible. */
const look = () => page.evaluate(() => {
  const text = (id) => {
    const found = document.getElementById(id);
    return found?.checkVisibility() ? found.innerText.trim() : null;
  };
  const frame = document.querySelector('#answer iframe');
  return {
    title: document.title,
    address: text('address'),
    offers: [...document.querySelectorAll('.offer')].map((offer) => offer.innerText),
    button: text('pay'),
    noButton: text('no-button'),
    mood: document.getElementById('status')?.className ?? null,
    status: text('status'),
    answer: text('answer-body'),
    receipt: text('receipt'),
    frame: frame && { sandbox: frame.getAttribute('sandbox') },
    image: document.querySelector('#answer img')?.naturalWidth ?? null,
    focused: document.activeElement?.id ?? null,
    kept: Object.keys(sessionStorage).filter((key) => key.startsWith('x402')).length,
    isSecure: isSecureContext,
    overflows: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  };
});

console.log(JSON.stringify({ ready: true }));
for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  await commands[command.do](command);
  const seen = await look();
  // The frame of an answer, which has no origin, is read from outside.
  const inner = page.frames().find((frame) => frame.parentFrame());
  if (seen.frame && inner) {
    await inner.waitForSelector('body');
    seen.frame.html = await inner.content();
  }
  console.log(JSON.stringify({ ...seen, text: whole, wrong, asked }));
  [whole, wrong, asked] = [null, [], []];
}
await browser.close();
