-- The log of dead letters.

CREATE TABLE tierline.dead_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    -- The message's id, or a hash of its content where it has none.
    identity text NOT NULL,
    -- How often it had been redriven when it died.
    life integer NOT NULL,
    message_id text,
    -- NULL where it could not be read.
    task text,
    -- The tier whose queue gave it up; "unrouted" for what found no tier.
    tier text NOT NULL,
    reason text NOT NULL,
    error text,
    error_kind text,
    error_type text,
    causes jsonb NOT NULL DEFAULT '[]',
    attempts integer NOT NULL,
    history jsonb NOT NULL DEFAULT '[]',
    enqueued_at timestamptz,
    died_at timestamptz NOT NULL,
    collected_at timestamptz NOT NULL DEFAULT now(),
    worker text,
    worker_version text,
    fingerprint text NOT NULL,
    -- The body as it came, and the same where it is JSON that Postgres accepts.
    payload bytea NOT NULL,
    payload_json jsonb,
    -- The properties as AMQP 0-9-1 has them on the wire, and the headers for queries.
    properties bytea NOT NULL,
    headers jsonb,
    state text NOT NULL DEFAULT 'dead'
        CHECK (state IN ('dead', 'redriving', 'redriven', 'discarded')),
    -- Who is redriving it, and since when: a claim that is old may be taken over.
    claim text,
    claimed_at timestamptz,
    -- The dead letter that it was in its life before.
    redriven_from bigint,
    redriven_at timestamptz,
    -- How its redrive ended.
    outcome text CHECK (outcome IN ('done', 'dead', 'discarded', 'expired')),
    outcome_at timestamptz,
    -- Who did what when: [{"at", "who", "what", "why"}].
    actions jsonb NOT NULL DEFAULT '[]',
    UNIQUE (app, identity, life)
);

-- Each list of the console is a walk along one of these, newest first.
CREATE INDEX dead_letters_by_time ON tierline.dead_letters
    (app, died_at DESC, id DESC) INCLUDE (fingerprint, state);
CREATE INDEX dead_letters_by_tier ON tierline.dead_letters (app, tier, died_at DESC, id DESC);
CREATE INDEX dead_letters_by_task ON tierline.dead_letters (app, task, died_at DESC, id DESC);
CREATE INDEX dead_letters_by_reason ON tierline.dead_letters (app, reason, died_at DESC, id DESC);
CREATE INDEX dead_letters_by_fingerprint ON tierline.dead_letters
    (app, fingerprint, died_at DESC, id DESC);
-- What is still to be dealt with.
CREATE INDEX dead_letters_dead ON tierline.dead_letters (app, died_at DESC, id DESC)
    WHERE state = 'dead';
CREATE INDEX dead_letters_claimed ON tierline.dead_letters (app, claimed_at)
    WHERE state = 'redriving';

-- The number of rows by tier and state, as changes that add up: each statement adds its own, so
-- nobody waits for anybody. The collector folds them together now and then.
CREATE TABLE tierline.dead_letter_counts (
    app text NOT NULL,
    tier text NOT NULL,
    state text NOT NULL,
    change bigint NOT NULL
);

CREATE FUNCTION tierline.count_dead_letters() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO tierline.dead_letter_counts
            SELECT app, tier, state, count(*) FROM gained GROUP BY app, tier, state;
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO tierline.dead_letter_counts
            SELECT app, tier, state, -count(*) FROM lost GROUP BY app, tier, state;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO tierline.dead_letter_counts
            SELECT app, tier, state, sum(change) FROM (
                SELECT app, tier, state, 1 AS change FROM gained
                UNION ALL
                SELECT app, tier, state, -1 FROM lost
            ) AS changes
            GROUP BY app, tier, state HAVING sum(change) <> 0;
    ELSE
        DELETE FROM tierline.dead_letter_counts;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER count_inserted AFTER INSERT ON tierline.dead_letters
    REFERENCING NEW TABLE AS gained
    FOR EACH STATEMENT EXECUTE FUNCTION tierline.count_dead_letters();
CREATE TRIGGER count_updated AFTER UPDATE ON tierline.dead_letters
    REFERENCING NEW TABLE AS gained OLD TABLE AS lost
    FOR EACH STATEMENT EXECUTE FUNCTION tierline.count_dead_letters();
CREATE TRIGGER count_deleted AFTER DELETE ON tierline.dead_letters
    REFERENCING OLD TABLE AS lost
    FOR EACH STATEMENT EXECUTE FUNCTION tierline.count_dead_letters();
CREATE TRIGGER count_truncated AFTER TRUNCATE ON tierline.dead_letters
    FOR EACH STATEMENT EXECUTE FUNCTION tierline.count_dead_letters();

-- What was done to many rows at once: it outlives the rows, and a redrive goes on from it.
CREATE TABLE tierline.dead_letter_operations (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    action text NOT NULL CHECK (action IN ('redrive', 'discard', 'purge')),
    who text NOT NULL,
    why text NOT NULL,
    filter jsonb NOT NULL,
    settings jsonb NOT NULL DEFAULT '{}',
    state text NOT NULL DEFAULT 'running'
        CHECK (state IN ('running', 'stopping', 'stopped', 'done')),
    -- The last row that it is about: what dies while it runs is left to the next.
    upto bigint NOT NULL,
    total bigint NOT NULL DEFAULT 0,
    done bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    refused bigint NOT NULL DEFAULT 0,
    note text NOT NULL DEFAULT '',
    -- Who runs it, and when they were last heard of.
    runner text,
    heard_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz
);
CREATE INDEX dead_letter_operations_by_time ON tierline.dead_letter_operations (app, id DESC);
