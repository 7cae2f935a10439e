'use strict';
/** What a text says in JSON; null if it is none. */
const json = (text) => {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
};

/** A message as a header's value, and back; null for what is none. */
const encode = (message) => btoa(String.fromCharCode(...new TextEncoder().encode(JSON.stringify(message))));
const decode = (header) => {
  try {
    return json(new TextDecoder().decode(Uint8Array.from(atob(header), (char) => char.charCodeAt(0))));
  } catch {
    return null;
  }
};

/**
 * Shows what was bought. It is the seller's and gets no power here: text stays text, and a page gets neither scripts nor
 * this page's origin.
 */
const showAnswer = async (body, receipt, { offer, from }, explorer) => {
  const make = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const url = URL.createObjectURL(body);
  const [type] = body.type.split(';');
  const isJson = /[/+]json$/.test(type);
  let shown = '';
  if (type === 'text/html') {
    shown = make('iframe', { title: 'The answer, without its scripts and styles', sandbox: '', src: url });
  } else if (type.startsWith('image/')) {
    shown = make('img', { alt: 'The answer', src: url });
  } else if (type.startsWith('text/') || isJson) {
    const text = await body.slice(0, 1 << 20).text();
    const said = isJson && json(text);
    shown = make('pre', { tabIndex: 0, textContent: said ? JSON.stringify(said, null, 2) : text });
  }
  const file = location.pathname.split('/').pop() || 'answer';
  const save = make('a', { href: url, download: file }, `Save ${file}`);
  const about = ` (${type || 'of unknown type'}, ${body.size.toLocaleString()} bytes)`;
  document.getElementById('answer-body').replaceChildren(shown, make('p', {}, save, about));

  const hash = receipt?.transaction;
  const href = `${explorer}/tx/${encodeURIComponent(hash)}`;
  const transaction = hash && explorer ? make('a', { href, rel: 'noreferrer' }, hash) : hash || 'none yet';
  const rows = { Transaction: transaction, From: receipt?.payer ?? from, To: offer.payTo };
  document.getElementById('receipt').replaceChildren(...Object.entries(rows).map(([term, value]) =>
    make('div', {}, make('dt', {}, term), make('dd', {}, make('code', {}, value)))));
  const section = document.getElementById('answer');
  section.hidden = false;
  section.focus();
};
