-- Where the evaluator of a card is asked, as its payee signed it: one evaluator has one card, however many URLs show it. Of those that
-- were listed before, the best is kept when they are asked for again.
ALTER TABLE cards ADD COLUMN endpoint TEXT NOT NULL DEFAULT '';
UPDATE cards SET endpoint = coalesce(
    (SELECT json_extract(value, '$.params.endpoint') FROM json_each(cards.card, '$.capabilities.extensions')
     WHERE json_extract(value, '$.uri') = 'https://docs.rs/tower-x402/latest/tower_x402/market/index.html#the-pricing-extension-version-1' ORDER BY key LIMIT 1),
    ''
);
DROP INDEX cards_by_payee;
CREATE INDEX cards_by_payee ON cards (pay_to, endpoint);
