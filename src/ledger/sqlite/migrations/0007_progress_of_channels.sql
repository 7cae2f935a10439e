-- The fields of a channel that its requests change, twice each, have a short row of their own: many of them fit on a page. For a channel
-- that has no such row, all of it is in `channels`.
CREATE TABLE channel_progress (
    id          INTEGER PRIMARY KEY,
    record      TEXT    NOT NULL
);
