-- Of a report whose payment was made by voucher: the channel, and the part of what is claimed of it that paid, in atomic units.
ALTER TABLE voices ADD COLUMN channel BLOB;
ALTER TABLE voices ADD COLUMN charged_from INTEGER;
ALTER TABLE voices ADD COLUMN charged_to INTEGER;
CREATE INDEX voices_by_channel ON voices (channel, charged_to) WHERE channel IS NOT NULL;
