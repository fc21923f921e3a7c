-- What happened in each minute, by tier and task. Processes add to it in batches.
CREATE TABLE tierline.rollups (
    app text NOT NULL,
    minute timestamptz NOT NULL CHECK (isfinite(minute)),
    tier text NOT NULL,
    task text NOT NULL,
    published bigint NOT NULL,
    delayed bigint NOT NULL,
    duplicates bigint NOT NULL,
    unpublished bigint NOT NULL,
    started bigint NOT NULL,
    done bigint NOT NULL,
    retried bigint NOT NULL,
    snoozed bigint NOT NULL,
    discarded bigint NOT NULL,
    expired bigint NOT NULL,
    dead bigint NOT NULL,
    given_back bigint NOT NULL,
    slo_met bigint NOT NULL,
    slo_counted bigint NOT NULL,
    is_paused boolean NOT NULL,
    -- Microseconds.
    wait_sum bigint NOT NULL,
    run_sum bigint NOT NULL,
    -- How many were below 1 ms, below 2 ms, below 4 ms …, without the empty ones at the end.
    wait bigint[] NOT NULL,
    run bigint[] NOT NULL,
    PRIMARY KEY (app, minute, tier, task)
) WITH (fillfactor = 70);

-- Which batch of a process was added last: one whose answer was lost is sent again, and must not count twice.
CREATE TABLE tierline.rollup_writers (
    process uuid PRIMARY KEY,
    app text NOT NULL,
    last_batch bigint NOT NULL,
    written_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70);

-- The sum of two histograms, as long as the longer one.
CREATE FUNCTION tierline.add_counts(bigint[], bigint[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT coalesce(array_agg(coalesce(pair.a, 0) + coalesce(pair.b, 0) ORDER BY pair.place), '{}')
    FROM unnest($1, $2) WITH ORDINALITY AS pair (a, b, place)
$$;

ALTER TABLE tierline.rollups SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
