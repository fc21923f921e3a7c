-- Dead letters are told apart by content, a failed redrive leaves a row as it was, and one alert is
-- raised for an app.
--
-- Locks: the new column takes ACCESS EXCLUSIVE on the log, for a change of the catalogue alone: no row
-- is read or written, however many there are. It waits for the statements that are under way on the
-- log, and new ones wait behind it: ten seconds at most, or it fails, and nothing has changed.
SET LOCAL lock_timeout = '10s';

-- `identity` is a hash of the message's id, task and payload from now on, or drawn where it has no id.
-- Rows from before keep the id, or a hash of it: as long as there are such rows, a message is looked for
-- under that too. A collector of the earlier release goes on as before, beside this one.

-- The state of a row before it was claimed for a redrive, to which it returns if that fails. NULL in
-- claims of the earlier release: 'dead'.
ALTER TABLE tierline.dead_letters ADD COLUMN claimed_from text;

-- When a tier was last said to grow too fast: whichever collector writes it raises the alert.
CREATE TABLE tierline.dead_letter_alerts (
    app text NOT NULL,
    tier text NOT NULL,
    raised_at timestamptz NOT NULL,
    count bigint NOT NULL,
    PRIMARY KEY (app, tier)
);
