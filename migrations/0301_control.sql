-- What operators change at run time: pauses, limits, overrides.
--
-- One that has ended stays for a time: a task that waited through a pause is not dead-lettered for that.
CREATE TABLE tierline.controls (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('pause', 'limit', 'override')),
    -- What it is about: all of a tier, of a group, of a task, or of the tasks whose names begin like this.
    target_kind text NOT NULL CHECK (target_kind IN ('tier', 'group', 'task', 'prefix')),
    target text NOT NULL,
    -- Of a limit, its keys as in the map. Of an override, the tier and the priority.
    setting jsonb NOT NULL DEFAULT '{}',
    who text NOT NULL,
    why text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- NULL: until somebody ends it.
    until timestamptz CHECK (isfinite(until))
);
CREATE INDEX controls_by_target ON tierline.controls (app, kind, target_kind, target);

-- Tasks that may not run now: they are paused, or at a limit. Claims never read them.
CREATE TABLE tierline.parked (
    id uuid PRIMARY KEY,
    due_at timestamptz NOT NULL CHECK (isfinite(due_at)),
    backlog integer NOT NULL,
    first_backlog integer,
    rank smallint NOT NULL CHECK (rank BETWEEN -255 AND 0 OR rank BETWEEN 745 AND 1000),
    is_held boolean NOT NULL DEFAULT false,
    task text NOT NULL,
    name text,
    properties bytea,
    payload bytea NOT NULL
);
-- The order in which the tasks of a name go on.
CREATE UNIQUE INDEX parked_order ON tierline.parked (backlog, task, rank, due_at, id);
CREATE INDEX parked_by_name ON tierline.parked (name) WHERE name IS NOT NULL;
-- Made last, so that a plan that was made while the table was empty looks ids up with it.
ALTER TABLE tierline.parked DROP CONSTRAINT parked_pkey, ADD CONSTRAINT parked_pkey PRIMARY KEY (id);

ALTER TABLE tierline.parked SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0.5);

-- Which processes live, and what each can run. NULL: the process is of a release that does not say.
ALTER TABLE tierline.workers
    -- The groups that it serves: [{"name": "bulk", "slots": 4, "tiers": ["exports"]}].
    ADD COLUMN groups jsonb,
    -- The tasks that it has handlers for.
    ADD COLUMN tasks text[];
