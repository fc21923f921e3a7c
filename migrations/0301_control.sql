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

-- Which processes live, and what each can run. NULL: the process is of a release that does not say.
ALTER TABLE tierline.workers
    -- The groups that it serves: [{"name": "bulk", "slots": 4, "tiers": ["exports"]}].
    ADD COLUMN groups jsonb,
    -- The tasks that it has handlers for.
    ADD COLUMN tasks text[];
