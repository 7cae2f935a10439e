-- One row per payment channel, numbered like those of payments. `record` holds all of it as JSON.
CREATE TABLE channels (
    id          INTEGER PRIMARY KEY,
    record      TEXT    NOT NULL
);
