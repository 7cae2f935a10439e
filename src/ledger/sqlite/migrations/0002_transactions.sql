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
