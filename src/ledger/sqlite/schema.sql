-- One row per payment that may still matter. Rows are numbered as they come: those that are worked on at one time share a few pages. The
-- number of each key is known in memory; an index over keys, which are random, would write a page for each payment. `record` is JSON: the
-- state machine is not in the database.
CREATE TABLE payments (
    id          INTEGER PRIMARY KEY,
    record      TEXT    NOT NULL
);

-- The fields of a payment that its steps change, by its number in `payments`, which has the others.
CREATE TABLE progress (
    id          INTEGER PRIMARY KEY,
    record      TEXT    NOT NULL
);

-- Responses kept for replays.
CREATE TABLE responses (
    id          INTEGER PRIMARY KEY,
    chain_id    INTEGER NOT NULL,
    asset       BLOB    NOT NULL,
    payer       BLOB    NOT NULL,
    nonce       BLOB    NOT NULL,
    stored_at   INTEGER NOT NULL,
    head        TEXT    NOT NULL,
    body        BLOB    NOT NULL
);

-- The number of settled payments whose records have aged out.
CREATE TABLE totals (
    settled     INTEGER NOT NULL
);
INSERT INTO totals (settled) VALUES (0);

-- Every transaction that may still be on its way, with the nonce it uses and the payments it settles (JSON: asset, payer, nonce).
CREATE TABLE transactions (
    chain_id     INTEGER NOT NULL,
    sender       BLOB    NOT NULL,
    nonce        INTEGER NOT NULL,
    hash         BLOB    NOT NULL,
    raw          BLOB    NOT NULL,
    payments     TEXT    NOT NULL,
    is_free      INTEGER NOT NULL,
    submitted_at INTEGER NOT NULL,
    PRIMARY KEY (chain_id, sender, nonce, hash)
);

-- One row per payment channel, numbered like payments, with all of it as JSON.
CREATE TABLE channels (
    id          INTEGER PRIMARY KEY,
    record      TEXT    NOT NULL
);

-- The fields of a channel that its requests change, twice each. The rows are short, so that many of them share a page.
CREATE TABLE channel_progress (
    id          INTEGER PRIMARY KEY,
    record      TEXT    NOT NULL
);
