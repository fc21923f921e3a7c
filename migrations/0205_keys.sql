-- Unique and idempotency keys of tasks that were published with one.
--
-- No statement frees a key when its task ends. A key is held until expires_at, and until then only while the row of its
-- task is where `holds` says: that is looked up by the row's id when the next publish with the key comes.
CREATE TABLE tierline.unique_keys (
    app text NOT NULL,
    -- unique or idempotency
    kind text NOT NULL,
    key text COLLATE "C" NOT NULL,
    -- The row of the task that has the key, and the task.
    row_id uuid NOT NULL,
    task_id text NOT NULL,
    tier text NOT NULL,
    -- started: while the row is scheduled or ready, or a relay has it. done: also while it is running. period: whatever becomes of the row.
    holds text NOT NULL CHECK (holds IN ('started', 'done', 'period')),
    expires_at timestamptz NOT NULL CHECK (isfinite(expires_at)),
    -- Of an idempotency key: the task's name and payload.
    digest bytea,
    -- The id of the task whose place this one took.
    replaced_id text,
    PRIMARY KEY (app, kind, key)
);
-- For the relay, which holds the keys of rows that leave Postgres.
CREATE INDEX unique_keys_by_row ON tierline.unique_keys (row_id);
-- The order of removal. Without the app: while the table was empty, a plan could else take it to look a key up.
CREATE INDEX unique_keys_by_expiry ON tierline.unique_keys (expires_at);

ALTER TABLE tierline.unique_keys SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0);

-- Rows are looked up by their ids. While a table is empty, all its indexes that have the id cost the same, and Postgres takes
-- the one that was made last. It keeps that plan for some time, and with the index of claims, which has the id as its
-- last column, each lookup would walk over all rows. So the primary keys are made last.
ALTER TABLE tierline.ready DROP CONSTRAINT ready_pkey, ADD CONSTRAINT ready_pkey PRIMARY KEY (id);
ALTER TABLE tierline.scheduled DROP CONSTRAINT scheduled_pkey, ADD CONSTRAINT scheduled_pkey PRIMARY KEY (id);

-- Publishes tasks with keys, as rows of one tier. Each entry is decided by itself and has one line in the answer, by its
-- place in the arrays:
--   inserted   the task is stored
--   replaced   the task is stored in the place of `other_id`, which waited
--   duplicate  task `other_id` of tier `other_tier` has the key
--   mismatch   the idempotency key was used for task `other_id`, with another digest
--   full       the tier has no room, and the task would be stored
--   busy       a transaction that has not ended has taken the key: try again
--   stale      the caller's snapshot (REPEATABLE READ, SERIALIZABLE) is older than the key: begin a new transaction
--
-- Two publishes of one key are decided by the key's unique index: the second waits until the transaction of the first
-- has ended. Only then, in a statement with a snapshot of its own, it looks what became of the first one's row. One
-- statement would see the new key, and the tables of rows as they were before it waited.
--
-- Each entry has a subtransaction, so that a key that is busy neither fails nor holds up the others, and leaves the
-- caller's transaction as it was. Keys are taken in one order, and no lock is waited for as long as a deadlock lasts.
-- A duplicate leaves no lock of its key behind, unless it locks a row.
--
-- A task whose key is held until it is started is to see what the caller's transaction writes. So if it waits, its row is
-- locked until that transaction ends: no worker claims a locked row.
CREATE FUNCTION tierline.publish_keyed(
    of_app text, of_tier text,
    -- Whether the caller's transaction goes on after this, and whether it waits a little for a key that is busy.
    is_within bool, is_patient bool,
    ids uuid[], ranks smallint[], tasks text[], names text[], all_properties bytea[], payloads bytea[], delays float8[],
    kinds text[], keys text[], task_ids text[], all_holds text[], times float8[], digests bytea[], may_replace bool[], have_room bool[],
    -- The tiers that keep finished tasks.
    keeping text[]
) RETURNS TABLE (entry integer, outcome text, other_id text, other_tier text)
LANGUAGE plpgsql
SET lock_timeout = '20ms'
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    of_backlog integer := (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = of_tier);
    began timestamptz := clock_timestamp();
    is_locked bool;
    is_row_locked bool;
    new record;
    held record;
    busy record;
BEGIN
    SELECT NULL::text AS kind, NULL::text AS key INTO busy;
    IF NOT is_patient THEN
        PERFORM set_config('lock_timeout', '1', true);
    END IF;
    FOR new IN
        SELECT * FROM unnest(ids, ranks, tasks, names, all_properties, payloads, delays, kinds, keys, task_ids, all_holds,
            times, digests, may_replace, have_room) WITH ORDINALITY AS entries (id, rank, task, name, properties, payload,
            delay, kind, key, task_id, holds, seconds, digest, replaces, has_room, number)
        ORDER BY kind, key COLLATE "C", number
    LOOP
        entry := new.number;
        outcome := NULL;
        other_id := NULL;
        other_tier := NULL;
        is_locked := false;
        is_row_locked := false;
        IF new.kind = busy.kind AND new.key = busy.key THEN
            outcome := 'busy';
            RETURN NEXT;
            CONTINUE;
        END IF;
        BEGIN
            WHILE outcome IS NULL LOOP
                SELECT row_id, task_id, tier, digest, replaced_id, expires_at > clock_timestamp()
                    AND (holds = 'period' OR waits OR relays OR holds = 'done' AND runs) AS is_held, waits
                INTO held
                FROM (SELECT *,
                    EXISTS (SELECT FROM tierline.scheduled WHERE id = row_id)
                        OR EXISTS (SELECT FROM tierline.ready WHERE id = row_id) AS waits,
                    EXISTS (SELECT FROM tierline.running WHERE id = row_id) AS runs,
                    -- A relay sends it to the broker, where it waits again.
                    EXISTS (SELECT FROM tierline.running JOIN tierline.workers ON workers.id = running.worker
                        WHERE running.id = row_id AND workers.is_relay) AS relays
                    FROM tierline.unique_keys WHERE app = of_app AND kind = new.kind AND key = new.key
                ) AS found;
                IF NOT FOUND AND NOT new.has_room THEN
                    outcome := 'full';
                ELSIF NOT FOUND THEN
                    INSERT INTO tierline.unique_keys (app, kind, key, row_id, task_id, tier, holds, expires_at, digest)
                    VALUES (of_app, new.kind, new.key, new.id, new.task_id, of_tier, new.holds,
                        clock_timestamp() + make_interval(secs => new.seconds), new.digest)
                    ON CONFLICT (app, kind, key) DO NOTHING;
                    IF FOUND THEN
                        outcome := 'inserted';
                    END IF;
                    -- Else the transaction of another one has ended meanwhile, and its key can be seen.
                ELSIF held.row_id = new.id THEN
                    -- An earlier attempt got no answer.
                    outcome := CASE WHEN held.replaced_id IS NULL THEN 'inserted' ELSE 'replaced' END;
                    other_id := held.replaced_id;
                ELSIF held.is_held AND NOT (new.replaces AND held.waits) THEN
                    IF is_within AND new.holds = 'started' AND held.waits THEN
                        PERFORM FROM tierline.ready WHERE id = held.row_id FOR KEY SHARE;
                        is_row_locked := FOUND;
                        IF NOT is_row_locked THEN
                            PERFORM FROM tierline.scheduled WHERE id = held.row_id FOR KEY SHARE;
                            is_row_locked := FOUND;
                        END IF;
                        -- It has moved since: look again.
                        CONTINUE WHEN NOT is_row_locked;
                    END IF;
                    outcome := CASE WHEN new.digest <> held.digest THEN 'mismatch' ELSE 'duplicate' END;
                    other_id := held.task_id;
                    other_tier := held.tier;
                ELSIF NOT is_locked THEN
                    PERFORM FROM tierline.unique_keys WHERE app = of_app AND kind = new.kind AND key = new.key FOR UPDATE;
                    is_locked := FOUND;
                ELSE
                    IF held.is_held THEN
                        WITH scheduled AS (
                            DELETE FROM tierline.scheduled WHERE id = held.row_id
                            RETURNING id, backlog, first_backlog, rank, due_at, task, name, properties, payload
                        ), ready AS (
                            DELETE FROM tierline.ready WHERE id = held.row_id
                            RETURNING id, backlog, first_backlog, rank, due_at, task, name, properties, payload
                        ), gone AS (
                            SELECT * FROM scheduled UNION ALL SELECT * FROM ready
                        ), kept AS (
                            INSERT INTO tierline.finished
                                (id, finished_at, backlog, first_backlog, rank, due_at, ending, task, name, properties, payload)
                            SELECT id, clock_timestamp(), backlog, first_backlog, rank, due_at, 'cancelled', task, name,
                                properties, payload
                            FROM gone
                            WHERE backlog IN (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = ANY(keeping))
                        ) SELECT held.task_id INTO other_id FROM gone;
                        -- It has moved since: look again.
                        CONTINUE WHEN other_id IS NULL;
                    END IF;
                    IF other_id IS NULL AND NOT new.has_room THEN
                        outcome := 'full';
                        CONTINUE;
                    END IF;
                    UPDATE tierline.unique_keys SET row_id = new.id, task_id = new.task_id, tier = of_tier, holds = new.holds,
                        expires_at = clock_timestamp() + make_interval(secs => new.seconds), digest = new.digest,
                        replaced_id = other_id
                    WHERE app = of_app AND kind = new.kind AND key = new.key;
                    outcome := CASE WHEN other_id IS NULL THEN 'inserted' ELSE 'replaced' END;
                END IF;
            END LOOP;
            IF outcome IN ('inserted', 'replaced') AND held.row_id IS DISTINCT FROM new.id THEN
                IF new.delay > 0 THEN
                    INSERT INTO tierline.scheduled (id, due_at, backlog, rank, task, name, properties, payload)
                    VALUES (new.id, began + make_interval(secs => new.delay), of_backlog, new.rank, new.task, new.name,
                        new.properties, new.payload)
                    ON CONFLICT (id) DO NOTHING;
                ELSE
                    INSERT INTO tierline.ready (id, due_at, backlog, rank, task, name, properties, payload)
                    VALUES (new.id, began + new.number * interval '1 microsecond', of_backlog, new.rank, new.task, new.name,
                        new.properties, new.payload)
                    ON CONFLICT (id) DO NOTHING;
                END IF;
            END IF;
            IF is_locked AND outcome IN ('duplicate', 'mismatch', 'full') AND NOT is_row_locked THEN
                -- Undoes the subtransaction, and with it the lock of the key.
                RAISE SQLSTATE 'TL001';
            END IF;
        EXCEPTION
            WHEN SQLSTATE 'TL001' THEN
                NULL;
            WHEN lock_not_available OR deadlock_detected THEN
                outcome := 'busy';
                other_id := NULL;
                other_tier := NULL;
                SELECT new.kind, new.key INTO busy;
                -- The others are not to wait for each key that is busy.
                PERFORM set_config('lock_timeout', '1', true);
            WHEN serialization_failure THEN
                outcome := 'stale';
                other_id := NULL;
                other_tier := NULL;
        END;
        RETURN NEXT;
    END LOOP;
END
$$;
