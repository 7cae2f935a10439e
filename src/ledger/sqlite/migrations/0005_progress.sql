-- What a payment is stays the same from its reservation on, what becomes of it changes with every step. In one row, all of it was
-- written again each time. The columns that nobody reads are gone with that: all they said is in `record`.
CREATE TABLE bought (
    id          INTEGER PRIMARY KEY,
    record      TEXT    NOT NULL
);
-- Of a row of an earlier version `record` holds both; what is not looked for is not read.
INSERT INTO bought SELECT id, record FROM payments;

CREATE TABLE progress (
    id          INTEGER PRIMARY KEY,
    record      TEXT    NOT NULL
);
INSERT INTO progress SELECT id, record FROM payments;

DROP TABLE payments;
ALTER TABLE bought RENAME TO payments;
