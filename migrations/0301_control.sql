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

-- How processes divide the limits of tiers and tasks. Few rows; each is written some times a second while something starts.
CREATE TABLE tierline.limits (
    app text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('tier', 'task')),
    name text NOT NULL,
    -- Rises with each change: nobody writes over what he has not read.
    version bigint NOT NULL DEFAULT 1,
    -- Who holds what, and what nobody holds, as JSON.
    state text NOT NULL,
    PRIMARY KEY (app, kind, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0);
