-- Cards, by where they were fetched. Numbers grow and are never used again, so that they can be read on from.
CREATE TABLE cards (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    url TEXT NOT NULL UNIQUE,
    host TEXT NOT NULL,
    pay_to BLOB NOT NULL,
    price INTEGER NOT NULL,
    card TEXT NOT NULL,
    first_seen INTEGER NOT NULL,
    last_seen INTEGER NOT NULL,
    checked_at INTEGER NOT NULL,
    listed INTEGER NOT NULL
) STRICT;
CREATE INDEX cards_by_payee ON cards (pay_to);
CREATE INDEX cards_by_host ON cards (host);
CREATE INDEX cards_by_check ON cards (checked_at);

CREATE TABLE card_skills (
    skill TEXT NOT NULL,
    card INTEGER NOT NULL REFERENCES cards (id) ON DELETE CASCADE,
    PRIMARY KEY (skill, card)
) STRICT, WITHOUT ROWID;
CREATE INDEX card_skills_by_card ON card_skills (card);

CREATE TABLE card_networks (
    chain_id INTEGER NOT NULL,
    card INTEGER NOT NULL REFERENCES cards (id) ON DELETE CASCADE,
    PRIMARY KEY (chain_id, card)
) STRICT, WITHOUT ROWID;
CREATE INDEX card_networks_by_card ON card_networks (card);

-- What evaluators were ever seen to offer: taking a skill off a card silences nobody.
CREATE TABLE offered (
    evaluator BLOB NOT NULL,
    skill TEXT NOT NULL,
    seen INTEGER NOT NULL,
    PRIMARY KEY (evaluator, skill)
) STRICT, WITHOUT ROWID;

CREATE TABLE voices (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chain_id INTEGER NOT NULL,
    asset BLOB NOT NULL,
    payer BLOB NOT NULL,
    nonce BLOB NOT NULL,
    evaluator BLOB NOT NULL,
    skill TEXT NOT NULL,
    said TEXT NOT NULL,
    block INTEGER NOT NULL,
    block_time INTEGER NOT NULL,
    final INTEGER NOT NULL,
    UNIQUE (chain_id, asset, payer, nonce)
) STRICT;
CREATE INDEX voices_by_evaluator ON voices (evaluator, id);
CREATE INDEX voices_by_cell ON voices (evaluator, skill, id);
CREATE INDEX voices_by_skill ON voices (skill, id);
CREATE INDEX voices_by_payer ON voices (payer, id);
CREATE INDEX voices_by_time ON voices (block_time);
CREATE INDEX voices_open ON voices (id) WHERE final = 0;

-- Payments up to this time may have spoken before, and were forgotten.
CREATE TABLE forgotten (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    until INTEGER NOT NULL
) STRICT;
INSERT INTO forgotten VALUES (1, 0);
-- So that no count has to walk the table.
CREATE TABLE sizes (
    name TEXT PRIMARY KEY,
    rows INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO sizes VALUES ('voices', 0);
CREATE TRIGGER voice_in AFTER INSERT ON voices BEGIN
    UPDATE sizes SET rows = rows + 1 WHERE name = 'voices';
END;
CREATE TRIGGER voice_out AFTER DELETE ON voices BEGIN
    UPDATE sizes SET rows = rows - 1 WHERE name = 'voices';
END;
