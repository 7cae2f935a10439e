// Looks at the operator's page of `x402 charge` in Chromium. Reads one line after the other, each {"id", "text"}: waits until that element
// shows that text, without loading the page again, and prints {"text", "wrong", "asked"}: what a person sees, what went wrong since the
// last line, and which addresses the page asked. {"picture", "width", "dark"} checks the page for accessibility and takes a picture.
//
//   BROWSER=/usr/bin/chromium PROFILE=/tmp/… node operator_page.mjs URL [PASSWORD]
import { createInterface } from 'node:readline';
import axe from 'axe-core';
import puppeteer from 'puppeteer-core';

const [url, password] = process.argv.slice(2);
const browser = await puppeteer.launch({
  executablePath: process.env.BROWSER,
  userDataDir: process.env.PROFILE,
  pipe: true,
  args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'],
});
const page = await browser.newPage();
await page.setViewport({ width: 1100, height: 800 });
let wrong = [];
const asked = new Set();
page.on('pageerror', (error) => wrong.push(String(error)));
page.on('dialog', (dialog) => {
  wrong.push(`a dialog: ${dialog.message()}`);
  dialog.dismiss();
});
page.on('console', (message) => {
  // The seller may be away, which the page shows.
  if (['error', 'warn'].includes(message.type()) && !message.text().startsWith('Failed to load resource')) wrong.push(message.text());
});
page.on('request', (request) => asked.add(new URL(request.url()).origin));
if (password) await page.authenticate({ username: 'operator', password });
await page.goto(url);

console.log(JSON.stringify({ ready: true }));
for await (const line of createInterface({ input: process.stdin })) {
  const { id, text, picture, width, dark } = JSON.parse(line);
  if (picture) {
    await page.setViewport({ width, height: 800 });
    await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: dark ? 'dark' : 'light' }]);
    await page.evaluate(axe.source);
    const { violations } = await page.evaluate(() => globalThis.axe.run(document));
    wrong.push(...violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(' ')}`));
    await page.screenshot({ path: picture, fullPage: true });
  } else {
    const shows = (id, text) => document.getElementById(id)?.innerText.includes(text);
    await page.waitForFunction(shows, { timeout: 50_000 }, id, text);
  }
  const seen = await page.evaluate(() => ({
    text: document.body.innerText,
    images: document.images.length,
    scripts: document.scripts.length,
    overflows: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  }));
  console.log(JSON.stringify({ ...seen, wrong, asked: [...asked] }));
  wrong = [];
}
await browser.close();
