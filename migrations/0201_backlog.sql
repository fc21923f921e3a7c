-- Tasks that wait, or run, in tiers with queue = "postgres", and rows of tiers on the broker.
--
-- Each phase has a table of its own, so that a claim walks only over what is ready, however much is scheduled.
-- A task is in exactly one of them: publish -> scheduled or ready, ready -> running (a claim), running -> nothing
-- (done), scheduled (a retry), ready (given back) or the log of dead letters.

-- The tiers in Postgres, by a number: names would make the index of claims three times as large.
CREATE TABLE tierline.backlogs (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    tier text NOT NULL,
    UNIQUE (app, tier)
);

CREATE TABLE tierline.ready (
    -- The task's id where tierline drew it, else a number of its own.
    id uuid PRIMARY KEY,
    due_at timestamptz NOT NULL CHECK (isfinite(due_at)),
    backlog integer NOT NULL,
    -- The tier that it was published to, where a rule of the map (promote) or an operator has moved it since. Such a task
    -- stays in its new tier when it is retried.
    first_backlog integer,
    -- The order within the tier, lowest first: 0 minus the priority. In quarantine 1000 minus the priority.
    rank smallint NOT NULL CHECK (rank BETWEEN -255 AND 0 OR rank BETWEEN 745 AND 1000),
    -- Whether a process that held the task has died. Such a task is marked as begun before it begins.
    is_held boolean NOT NULL DEFAULT false,
    task text NOT NULL,
    -- The task's id where the publisher chose it.
    name text,
    -- AMQP properties in their wire form. NULL: a first attempt that these columns describe completely.
    properties bytea,
    payload bytea NOT NULL
);
-- The order of claims.
CREATE UNIQUE INDEX ready_order ON tierline.ready (backlog, rank, due_at, id);
CREATE INDEX ready_by_name ON tierline.ready (name) WHERE name IS NOT NULL;

CREATE TABLE tierline.scheduled (
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
CREATE UNIQUE INDEX scheduled_order ON tierline.scheduled (backlog, due_at, id);
CREATE INDEX scheduled_by_name ON tierline.scheduled (name) WHERE name IS NOT NULL;

CREATE TABLE tierline.running (
    id uuid PRIMARY KEY,
    due_at timestamptz NOT NULL,
    -- Drawn at random for each claim: every statement about a run names the token of its claim.
    token bigint NOT NULL,
    -- The process that claimed it: tierline.workers.
    worker bigint NOT NULL,
    backlog integer NOT NULL,
    first_backlog integer,
    rank smallint NOT NULL,
    -- Whether its handler has begun. What is claimed and not begun has crashed nobody.
    is_begun boolean NOT NULL DEFAULT false,
    is_held boolean NOT NULL DEFAULT false,
    task text NOT NULL,
    name text,
    properties bytea,
    payload bytea NOT NULL
);

-- The processes that claim tasks. One whose last heartbeat is older than its own lease of a tier has lost what it claimed there.
CREATE TABLE tierline.workers (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    name text NOT NULL,
    version text NOT NULL,
    -- The lease of each tier that it serves, in seconds: {"exports": 30}.
    leases jsonb NOT NULL,
    -- Whether it is a relay, which runs no tasks: what it holds when it dies is not suspected.
    is_relay boolean NOT NULL DEFAULT false,
    started_at timestamptz NOT NULL DEFAULT now(),
    heartbeat_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

-- Rows come and go by the thousand: vacuum by their number, not by the size of the table.
ALTER TABLE tierline.ready SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0.5);
ALTER TABLE tierline.scheduled SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0.5);
ALTER TABLE tierline.running SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0.5);
