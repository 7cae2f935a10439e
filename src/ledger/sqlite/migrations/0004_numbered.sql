-- Rows are found by a number of their own, which grows, and no longer by their keys: those are random, so that an index over them had
-- a page to write for each new payment, anywhere in the file. Which number belongs to which key is known in memory.
CREATE TABLE numbered_payments (
    id          INTEGER PRIMARY KEY,
    chain_id    INTEGER NOT NULL,
    asset       BLOB    NOT NULL,
    payer       BLOB    NOT NULL,
    nonce       BLOB    NOT NULL,
    fulfilment  TEXT    NOT NULL,
    settlement  TEXT    NOT NULL,
    record      TEXT    NOT NULL
);
INSERT INTO numbered_payments
    SELECT rowid, chain_id, asset, payer, nonce, fulfilment, settlement, record FROM payments ORDER BY rowid;
DROP TABLE payments;
ALTER TABLE numbered_payments RENAME TO payments;

CREATE TABLE numbered_responses (
    id          INTEGER PRIMARY KEY,
    chain_id    INTEGER NOT NULL,
    asset       BLOB    NOT NULL,
    payer       BLOB    NOT NULL,
    nonce       BLOB    NOT NULL,
    stored_at   INTEGER NOT NULL,
    head        TEXT    NOT NULL,
    body        BLOB    NOT NULL
);
INSERT INTO numbered_responses
    SELECT rowid, chain_id, asset, payer, nonce, stored_at, head, body FROM responses ORDER BY rowid;
DROP TABLE responses;
ALTER TABLE numbered_responses RENAME TO responses;
