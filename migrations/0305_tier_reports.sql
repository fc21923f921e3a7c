-- What each process sees of the tiers that it serves, for statistics. A process writes its own rows alone.
CREATE TABLE tierline.tier_reports (
    app text NOT NULL,
    tier text NOT NULL,
    -- Zeros: of all processes that report no more.
    process uuid NOT NULL,
    -- How many tasks of the tier it runs.
    running integer NOT NULL,
    -- Since when the tasks that it has started had waited: the latest.
    last_enqueued timestamptz,
    -- When the broker last said that the tier's queue was empty.
    empty_at timestamptz,
    reported_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (app, tier, process)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
