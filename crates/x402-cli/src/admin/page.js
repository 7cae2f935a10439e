// Draws what /summary says, every two seconds. Everything from there is set as text and never as markup.
'use strict';

const INTERVAL = 2000;
/** When the last answer came, for the note that the page is old. */
let last = null;

const byId = (id) => document.getElementById(id);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Atomic units as dollars: at least two decimals, and no more than are needed. */
function dollars(units) {
  const digits = String(units).padStart(7, '0');
  const fraction = digits.slice(-6).replace(/0{1,4}$/, '');
  return `$${digits.slice(0, -6).replace(/\B(?=(\d{3})+$)/g, ',')}.${fraction}`;
}

const sum = (units) => units.reduce((all, one) => all + BigInt(one), 0n);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

function tile(list, name, value, className, link) {
  const described = element('dd', link ? undefined : value, className);
  if (link) {
    const anchor = element('a', value, className);
    anchor.href = link;
    described.append(anchor);
  }
  const group = element('div');
  group.append(element('dt', name), described);
  list.push(group);
}

function row(cells) {
  const made = element('tr');
  made.append(...cells);
  return made;
}

const text = (value) => element('td', value);
const number = (value, className = '') => element('td', value, `number ${className}`.trim());

/** A bar for each hour, the newest on the right. */
function bars(hours, most) {
  const [width, height] = [hours.length * 8, 28];
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const set = (target, attributes) => {
    for (const [name, value] of Object.entries(attributes)) target.setAttribute(name, value);
  };
  set(svg, { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${dollars(sum(hours))} in ${hours.length} hours` });
  hours.forEach((units, index) => {
    const share = most > 0n ? Number((BigInt(units) * 1000n) / most) / 1000 : 0;
    const tall = BigInt(units) > 0n ? Math.max(2, share * height) : 0;
    const bar = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    set(bar, { x: index * 8, y: height - tall, width: 6, height: tall });
    svg.append(bar);
  });
  return svg;
}

function drawRoutes(routes) {
  const most = routes.flatMap(({ hours }) => hours).reduce((most, units) => (BigInt(units) > most ? BigInt(units) : most), 0n);
  const rows = routes.map(({ route, price, hours }) => {
    const drawn = element('td');
    drawn.append(bars(hours, most));
    return row([
      element('td', route, 'address'), text(price ?? 'removed'), drawn, number(dollars(hours.at(-1))), number(dollars(sum(hours))),
    ]);
  });
  byId('routes').replaceChildren(...rows);
}

/** `sells` is false for whoever settles for others: the prices and the channels are not its own. */
function drawBooks(books, routes, sells) {
  const [payments, channels] = [books?.payments ?? [], books?.channels ?? []];
  const of = (list, field) => dollars(sum(list.map(field)));
  const count = (list, field) => list.reduce((all, one) => all + field(one), 0);
  const open = (asset) => ['due', 'submitted', 'unknown'].map((state) => asset.states[state]?.units ?? '0');
  const tiles = [];
  if (sells) tile(tiles, 'Charged, 24 hours', dollars(sum(routes.flatMap(({ hours }) => hours))));
  tile(tiles, 'Settled', of(payments, ({ paid }) => paid.units));
  tile(tiles, 'Being settled', dollars(sum(payments.flatMap(open))), '', 'payments?state=open');
  if (sells) {
    tile(tiles, 'Claimed', of(channels, ({ claimed }) => claimed));
    tile(tiles, 'Unclaimed', of(channels, ({ unclaimed }) => unclaimed), '', 'channels?state=unclaimed');
    const risk = sum(channels.map(({ at_risk }) => at_risk));
    tile(tiles, 'At risk', dollars(risk), risk > 0n ? 'bad' : '', 'channels?state=at-risk');
    const owed = count(payments, ({ owed }) => owed.payments);
    tile(tiles, 'Owed to payers', `${of(payments, ({ owed }) => owed.units)} (${owed})`, owed > 0 ? 'bad' : '', 'payments?state=owed');
  }
  byId('money').replaceChildren(...tiles);
  const rows = channels.map((channel) => row([
    text(channel.network), number(String(channel.channels)),
    ...['charged', 'claimed', 'unclaimed', 'at_risk', 'unspent'].map((name) => number(dollars(channel[name]))),
  ]));
  byId('channels').replaceChildren(...(rows.length > 0 ? rows : [row([text('none yet')])]));
  let note = 'The ledger is being gone through for the first time.';
  if (books?.error) note = `The ledger could not be read at ${clock(books.at)}: ${books.error}`;
  else if (books) note = `The ledger as it was at ${clock(books.at)}; going through it took ${books.took.toFixed(1)} s.`;
  byId('books-at').textContent = note;
  byId('books-at').className = books?.error ? 'note bad' : 'note';
}

function draw({ about, ready, reasons, routes, requests, settling, tanks, books, started }) {
  const sells = Boolean(about.pay_to);
  document.title = about.command;
  byId('command').textContent = about.command;
  const what = sells ? `for ${about.upstream}, paid to ${about.pay_to} on` : 'settling for others on';
  byId('about').textContent =
    `${about.listening} ${what} ${about.network}${about.is_real ? '' : ' (a chain in the process: no real money)'}, ledger ${about.ledger}`;
  byId('income').hidden = byId('channels-section').hidden = !sells;
  byId('since').textContent = ` since ${new Date(started * 1000).toLocaleString()}`;
  byId('state').textContent = ready ? 'Ready' : 'Not ready';
  byId('state').className = ready ? 'good' : 'bad';
  byId('reasons').hidden = ready;
  byId('reasons-list').replaceChildren(...reasons.map(({ scheme, code, detail }) => element('li', `${scheme}: ${detail} (${code})`)));
  drawBooks(books, routes, sells);
  drawRoutes(routes);
  byId('tanks').replaceChildren(...tanks.map(({ account, network, ether, is_low }) =>
    row([element('td', account, 'address'), text(network), number(is_low ? `${ether} (low)` : ether, is_low ? 'bad' : '')])));
  const tiles = [];
  for (const [outcome, times] of Object.entries(requests)) tile(tiles, outcome, times.toLocaleString('en'));
  if (tiles.length === 0) tile(tiles, 'none yet', '0');
  tile(tiles, 'in settlement now', settling.toLocaleString('en'));
  byId('requests').replaceChildren(...tiles);
}

async function look() {
  try {
    const answer = await fetch('summary', { cache: 'no-store', signal: AbortSignal.timeout(10 * INTERVAL) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    draw(await answer.json());
    last = new Date();
  } catch (error) {
    const since = last ? ` since ${last.toLocaleTimeString()}; what is below is as it was then` : '';
    byId('state').textContent = `No answer${since} (${error.message})`;
    byId('state').className = 'bad';
  }
  setTimeout(wait, INTERVAL);
}

/** Nobody looks at a page in the background. */
function wait() {
  if (!document.hidden) look();
  else document.addEventListener('visibilitychange', wait, { once: true });
}

look();
