-- The properties as they came, of a message whose properties had to be repaired before they could be
-- read. Adding a column without a default changes no row: it takes a moment on a log of any size.
ALTER TABLE tierline.dead_letters ADD COLUMN raw_properties bytea;
