-- Rows in the order in which payments arrive, found by an index: what is being worked on at one time, and is written again with
-- every step, shares a few pages. In the order of their keys, which are random, every row had a page of its own and, being longer
-- than such a page takes in one piece, another one.
CREATE TABLE payments_in_order (
    chain_id    INTEGER NOT NULL,
    asset       BLOB    NOT NULL,
    payer       BLOB    NOT NULL,
    nonce       BLOB    NOT NULL,
    fulfilment  TEXT    NOT NULL,
    settlement  TEXT    NOT NULL,
    record      TEXT    NOT NULL,
    PRIMARY KEY (nonce, payer, asset, chain_id)
);
INSERT INTO payments_in_order SELECT chain_id, asset, payer, nonce, fulfilment, settlement, record FROM payments;
DROP TABLE payments;
ALTER TABLE payments_in_order RENAME TO payments;

CREATE TABLE responses_in_order (
    chain_id    INTEGER NOT NULL,
    asset       BLOB    NOT NULL,
    payer       BLOB    NOT NULL,
    nonce       BLOB    NOT NULL,
    stored_at   INTEGER NOT NULL,
    head        TEXT    NOT NULL,
    body        BLOB    NOT NULL,
    PRIMARY KEY (nonce, payer, asset, chain_id)
);
INSERT INTO responses_in_order SELECT chain_id, asset, payer, nonce, stored_at, head, body FROM responses;
DROP TABLE responses;
ALTER TABLE responses_in_order RENAME TO responses;
