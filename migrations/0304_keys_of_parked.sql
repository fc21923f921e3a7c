-- As in migration 205, and a task that is parked waits: it has its key.
CREATE OR REPLACE FUNCTION tierline.publish_keyed(
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
                        OR EXISTS (SELECT FROM tierline.ready WHERE id = row_id)
                        OR EXISTS (SELECT FROM tierline.parked WHERE id = row_id) AS waits,
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
                        IF NOT is_row_locked THEN
                            PERFORM FROM tierline.parked WHERE id = held.row_id FOR KEY SHARE;
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
                        ), parked AS (
                            -- Its lane is placed anew by the next claim: a lock of the lane would last as long as the
                            -- caller's transaction, and hold up the lane's other tasks.
                            DELETE FROM tierline.parked WHERE id = held.row_id
                            RETURNING id, backlog, first_backlog, rank, due_at, task, name, properties, payload
                        ), gone AS (
                            SELECT * FROM scheduled UNION ALL SELECT * FROM ready UNION ALL SELECT * FROM parked
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
