-- How many reports each payer has, and when the oldest of their payments was made: a full directory drops a report of a payer that has
-- most. Payments of a payer up to `until` may have had a report that was dropped. A payer without reports is kept for that.
CREATE TABLE payers (
    payer BLOB PRIMARY KEY,
    reports INTEGER NOT NULL,
    oldest INTEGER NOT NULL,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO payers SELECT payer, count(*), min(block_time), 0 FROM voices GROUP BY payer;
CREATE INDEX payers_by_reports ON payers (reports DESC, oldest);
CREATE INDEX payers_by_until ON payers (until) WHERE reports = 0;
CREATE INDEX voices_by_payer_and_time ON voices (payer, block_time, id);
CREATE TRIGGER payer_in AFTER INSERT ON voices BEGIN
    INSERT INTO payers (payer, reports, oldest, until) VALUES (new.payer, 1, new.block_time, 0)
        ON CONFLICT DO UPDATE SET reports = reports + 1, oldest = iif(reports = 0, excluded.oldest, min(oldest, excluded.oldest));
END;
CREATE TRIGGER payer_out AFTER DELETE ON voices BEGIN
    UPDATE payers SET reports = reports - 1,
        oldest = coalesce((SELECT min(block_time) FROM voices WHERE payer = old.payer), 0) WHERE payer = old.payer;
    DELETE FROM payers WHERE payer = old.payer AND reports = 0 AND until <= (SELECT until FROM forgotten);
END;
