-- One row per payment channel. `record` holds all of it as JSON, `stamp` is as for payments. Channels with a time to forget may be removed
-- from then on when there is no room, those that were not used for longest first.
CREATE TABLE channels (
    id        bytea  NOT NULL PRIMARY KEY,
    stamp     bigint NOT NULL,
    used_at   bigint NOT NULL,
    forget_at bigint,
    record    text   NOT NULL
);
CREATE INDEX channels_to_forget ON channels (used_at) WHERE forget_at IS NOT NULL;
