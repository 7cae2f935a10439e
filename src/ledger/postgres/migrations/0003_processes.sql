-- Every process that uses the ledger says here, once a second, that it is alive. A lease, a claim or an account nonce counts as long as
-- its process does so: the columns named after a process say whose it is, and 0 is nobody.
CREATE TABLE processes (
    id      bigint      NOT NULL PRIMARY KEY,
    seen_at timestamptz NOT NULL
);

ALTER TABLE payments ADD COLUMN lease_process bigint NOT NULL DEFAULT 0;
ALTER TABLE payments ADD COLUMN settling_process bigint NOT NULL DEFAULT 0;
ALTER TABLE channels ADD COLUMN pending_process bigint NOT NULL DEFAULT 0;
ALTER TABLE channels ADD COLUMN claiming_process bigint NOT NULL DEFAULT 0;
ALTER TABLE nonces ADD COLUMN process bigint NOT NULL DEFAULT 0;
