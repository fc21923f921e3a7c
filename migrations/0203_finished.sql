-- Finished tasks of tiers with `keep`, as a history. Claims never read it.
CREATE TABLE tierline.finished (
    id uuid NOT NULL,
    finished_at timestamptz NOT NULL,
    backlog integer NOT NULL,
    first_backlog integer,
    rank smallint NOT NULL,
    due_at timestamptz NOT NULL,
    -- How it ended: done, discarded, expired, cancelled.
    ending text NOT NULL,
    -- The worker that ran it.
    worker text,
    task text NOT NULL,
    name text,
    properties bytea,
    payload bytea NOT NULL,
    -- A publish that got no answer is repeated, so the same task may end twice.
    PRIMARY KEY (id, finished_at)
);
-- The order of lists, and of removal.
CREATE INDEX finished_order ON tierline.finished (backlog, finished_at, id);
CREATE INDEX finished_by_name ON tierline.finished (name) WHERE name IS NOT NULL;
