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

-- Responses kept for replays, by the payment's key. Head and body are the transport's.
CREATE TABLE responses (
    id          INTEGER PRIMARY KEY,
    key         BLOB    NOT NULL,
    stored_at   INTEGER NOT NULL,
    head        BLOB    NOT NULL,
    body        BLOB    NOT NULL
);

-- What is counted of payments whose records have aged out: those that were settled, and those whose outcome nobody has found out.
CREATE TABLE totals (
    settled     INTEGER NOT NULL,
    unresolved  INTEGER NOT NULL
);
INSERT INTO totals (settled, unresolved) VALUES (0, 0);

-- The account nonces in use, each with its newest transaction and the keys of the payments that it settles, one after the other.
CREATE TABLE nonces (
    chain_id     INTEGER NOT NULL,
    sender       BLOB    NOT NULL,
    nonce        INTEGER NOT NULL,
    hash         BLOB    NOT NULL,
    raw          BLOB    NOT NULL,
    payments     BLOB    NOT NULL,
    is_free      INTEGER NOT NULL,
    submitted_at INTEGER NOT NULL,
    PRIMARY KEY (chain_id, sender, nonce)
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
