-- One row per payment that may still matter, and one per response kept for replays. `record` holds the rest as JSON: the
-- state machine is not in the database.
CREATE TABLE payments (
    chain_id    INTEGER NOT NULL,
    asset       BLOB    NOT NULL,
    payer       BLOB    NOT NULL,
    nonce       BLOB    NOT NULL,
    fulfilment  TEXT    NOT NULL,
    settlement  TEXT    NOT NULL,
    record      TEXT    NOT NULL,
    PRIMARY KEY (chain_id, asset, payer, nonce)
) WITHOUT ROWID;

CREATE TABLE responses (
    chain_id    INTEGER NOT NULL,
    asset       BLOB    NOT NULL,
    payer       BLOB    NOT NULL,
    nonce       BLOB    NOT NULL,
    stored_at   INTEGER NOT NULL,
    head        TEXT    NOT NULL,
    body        BLOB    NOT NULL,
    PRIMARY KEY (chain_id, asset, payer, nonce)
) WITHOUT ROWID;

-- What was settled in records that have aged out.
CREATE TABLE totals (
    settled     INTEGER NOT NULL
);
INSERT INTO totals (settled) VALUES (0);
