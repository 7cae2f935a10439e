-- Cards, by where they were fetched. Numbers grow and are never used again, so that they can be read on from. `endpoint` is where the
-- evaluator is asked, as its payee signed it: one evaluator has one card, however many URLs show it.
CREATE TABLE cards (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    url TEXT NOT NULL UNIQUE,
    host TEXT NOT NULL,
    pay_to BLOB NOT NULL,
    card TEXT NOT NULL,
    first_seen INTEGER NOT NULL,
    last_seen INTEGER NOT NULL,
    checked_at INTEGER NOT NULL,
    listed INTEGER NOT NULL,
    endpoint TEXT NOT NULL
) STRICT;
CREATE INDEX cards_by_payee ON cards (pay_to, endpoint);
CREATE INDEX cards_by_host ON cards (host);
CREATE INDEX cards_by_check ON cards (checked_at);

CREATE TABLE card_skills (
    skill TEXT NOT NULL,
    card INTEGER NOT NULL REFERENCES cards (id) ON DELETE CASCADE,
    PRIMARY KEY (skill, card)
) STRICT, WITHOUT ROWID;
CREATE INDEX card_skills_by_card ON card_skills (card);

-- The skills that evaluators were ever seen to offer, kept for as long as one of their cards is: an evaluator that takes a skill off its
-- card silences nobody. `price` is the lowest price per output, in atomic units, that was seen with the skill: a payment below it bought
-- nothing. It never rises, so that reports about payments at an earlier price are accepted.
CREATE TABLE offered (
    evaluator BLOB NOT NULL,
    skill TEXT NOT NULL,
    seen INTEGER NOT NULL,
    price INTEGER NOT NULL,
    PRIMARY KEY (evaluator, skill)
) STRICT, WITHOUT ROWID;

-- Reports. One about a payment by voucher has the channel, and the part of what is claimed of it that paid, in atomic units.
CREATE TABLE reports (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chain_id INTEGER NOT NULL,
    asset BLOB NOT NULL,
    payer BLOB NOT NULL,
    nonce BLOB NOT NULL,
    evaluator BLOB NOT NULL,
    skill TEXT NOT NULL,
    report TEXT NOT NULL,
    block INTEGER NOT NULL,
    block_time INTEGER NOT NULL,
    final INTEGER NOT NULL,
    -- Of an audited evaluation: how it ordered the pairs. Of a failure: that it is one.
    pairs INTEGER,
    pairs_right INTEGER,
    pairs_wrong INTEGER,
    failed INTEGER NOT NULL,
    channel BLOB,
    charged_from INTEGER,
    charged_to INTEGER,
    UNIQUE (chain_id, asset, payer, nonce)
) STRICT;
CREATE INDEX reports_by_evaluator ON reports (evaluator, id);
CREATE INDEX reports_by_cell ON reports (evaluator, skill, id);
CREATE INDEX reports_by_skill ON reports (skill, id);
CREATE INDEX reports_by_payer ON reports (payer, id);
CREATE INDEX reports_by_payer_and_time ON reports (payer, block_time, id);
CREATE INDEX reports_by_time ON reports (block_time);
CREATE INDEX reports_by_channel ON reports (channel, charged_to) WHERE channel IS NOT NULL;
CREATE INDEX reports_open ON reports (id) WHERE final = 0;

-- Payments up to this time may have had a report, which was removed.
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
INSERT INTO sizes VALUES ('reports', 0);
CREATE TRIGGER report_in AFTER INSERT ON reports BEGIN
    UPDATE sizes SET rows = rows + 1 WHERE name = 'reports';
END;
CREATE TRIGGER report_out AFTER DELETE ON reports BEGIN
    UPDATE sizes SET rows = rows - 1 WHERE name = 'reports';
END;

-- How many reports each payer has, and when the oldest of their payments was made: a full directory drops a report of a payer that has
-- most. Payments of a payer up to `until` may have had a report that was dropped. A payer without reports is kept for that.
CREATE TABLE payers (
    payer BLOB PRIMARY KEY,
    reports INTEGER NOT NULL,
    oldest INTEGER NOT NULL,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX payers_by_reports ON payers (reports DESC, oldest);
CREATE INDEX payers_by_until ON payers (until) WHERE reports = 0;
CREATE TRIGGER payer_in AFTER INSERT ON reports BEGIN
    INSERT INTO payers (payer, reports, oldest, until) VALUES (new.payer, 1, new.block_time, 0)
        ON CONFLICT DO UPDATE SET reports = reports + 1, oldest = iif(reports = 0, excluded.oldest, min(oldest, excluded.oldest));
END;
CREATE TRIGGER payer_out AFTER DELETE ON reports BEGIN
    UPDATE payers SET reports = reports - 1,
        oldest = coalesce((SELECT min(block_time) FROM reports WHERE payer = old.payer), 0) WHERE payer = old.payer;
    DELETE FROM payers WHERE payer = old.payer AND reports = 0 AND until <= (SELECT until FROM forgotten);
END;
