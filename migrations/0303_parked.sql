-- Tasks that are held back: they are paused, at a limit, or wait for the turn of their key. Claims of ready tasks never read
-- them.
--
-- A lane is the list of parked tasks of one tier, task and key. So a key with any number of tasks is one row to whoever looks
-- for the next task that may run. A task that is paused, or has a limit as a whole, has one lane without a key. A task with a
-- limit per key has a lane for each key, and a tier with `fair` has one for each key, of no task.

CREATE TABLE tierline.lanes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    backlog integer NOT NULL,
    -- Empty: all tasks of the tier.
    task text COLLATE "C" NOT NULL,
    -- "=" and the key, which may be empty. Empty: the tasks are not told apart by a key.
    key text COLLATE "C" NOT NULL,
    -- What its runs are counted under: the same for a task and key in all tiers of the app.
    counted bigint NOT NULL,
    -- The rank of the first task that waits. NULL: none waits, but perhaps suspects.
    rank smallint,
    -- The order among lanes of one rank: the due time of the first task that waits, or in a tier with `fair` when the key had
    -- its last turn.
    turn timestamptz,
    -- Whether a task waits that may kill its worker.
    has_suspects boolean NOT NULL DEFAULT false,
    -- When the last task was moved here.
    parked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Since when no task waits. A lane is removed some time after that.
    emptied_at timestamptz,
    UNIQUE (backlog, task, key)
);
-- Lanes in which a task waits, in the order of claims.
CREATE UNIQUE INDEX lanes_order ON tierline.lanes (backlog, task, rank, turn, id) WHERE rank IS NOT NULL;
CREATE INDEX lanes_suspects ON tierline.lanes (backlog, task) WHERE has_suspects;
CREATE INDEX lanes_empty ON tierline.lanes (emptied_at) WHERE emptied_at IS NOT NULL;

CREATE TABLE tierline.parked (
    id uuid NOT NULL,
    lane bigint NOT NULL,
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
CREATE UNIQUE INDEX parked_order ON tierline.parked (lane, rank, due_at, id);
-- The order of lists.
CREATE UNIQUE INDEX parked_by_tier ON tierline.parked (backlog, rank, due_at, id);
CREATE INDEX parked_by_name ON tierline.parked (name) WHERE name IS NOT NULL;
-- Made last, so that a plan that was made while the table was empty looks ids up with it.
ALTER TABLE tierline.parked ADD CONSTRAINT parked_pkey PRIMARY KEY (id);

-- Of a run that counts for its key: what it is counted under.
ALTER TABLE tierline.running ADD COLUMN counted bigint;
CREATE INDEX running_by_key ON tierline.running (counted) WHERE counted IS NOT NULL;

ALTER TABLE tierline.parked SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0.5);
ALTER TABLE tierline.lanes SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0);

-- Sets the place of lanes that this transaction has locked, after their tasks have changed.
CREATE FUNCTION tierline.place_lanes(lane_ids bigint[], had_turn bool) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE tierline.lanes SET rank = placed.rank, turn = placed.turn, has_suspects = placed.has_suspects,
        emptied_at = CASE WHEN placed.is_empty THEN coalesce(lanes.emptied_at, clock_timestamp()) END
    FROM (
        SELECT known.id, first.rank, suspects.wait AS has_suspects, first.rank IS NULL AND NOT suspects.wait AS is_empty,
            CASE
                WHEN known.task <> '' THEN first.due_at
                WHEN had_turn THEN clock_timestamp()
                ELSE coalesce(known.turn, clock_timestamp())
            END AS turn
        FROM unnest(lane_ids) AS changed (id) JOIN tierline.lanes AS known ON known.id = changed.id
        LEFT JOIN LATERAL (
            SELECT rank, due_at FROM tierline.parked WHERE lane = changed.id AND rank <= 0 ORDER BY rank, due_at, id LIMIT 1
        ) AS first ON true
        CROSS JOIN LATERAL (
            SELECT EXISTS (SELECT FROM tierline.parked WHERE lane = changed.id AND rank > 0) AS wait
        ) AS suspects
    ) AS placed
    WHERE lanes.id = placed.id AND (
        (lanes.rank, lanes.turn, lanes.has_suspects) IS DISTINCT FROM (placed.rank, placed.turn, placed.has_suspects)
        OR (lanes.emptied_at IS NOT NULL) <> placed.is_empty);
END
$$;

-- Locks lanes for tasks to be moved there, and makes those that are not there. They must come in the order of their task and
-- key, in which all lock them. Returns their numbers.
CREATE FUNCTION tierline.lock_lanes(of_app text, of_backlog integer, lane_tasks text[], lane_keys text[]) RETURNS bigint[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    lane_ids bigint[];
BEGIN
    WITH locked AS (
        INSERT INTO tierline.lanes (backlog, task, key, counted)
        SELECT of_backlog, task, key, hashtextextended(key, hashtextextended(task, hashtextextended(of_app, 0)))
        FROM unnest(lane_tasks, lane_keys) WITH ORDINALITY AS new (task, key, number) ORDER BY number
        ON CONFLICT (backlog, task, key) DO UPDATE SET parked_at = clock_timestamp()
        RETURNING id, task, key
    ) SELECT array_agg(id ORDER BY task, key) INTO lane_ids FROM locked;
    RETURN lane_ids;
END
$$;

-- Moves tasks that are ready, or that a worker has claimed and not begun, to their lanes. Lane `lane_of[i]` of `lane_tasks` and
-- `lane_keys` is that of task `ids[i]`; `tokens` are those of claims, or NULL for ready tasks, which the caller has locked.
-- Returns how many tasks moved.
CREATE FUNCTION tierline.park(
    of_app text, of_tier text, lane_tasks text[], lane_keys text[],
    ids uuid[], lane_of integer[], tokens bigint[]
) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_backlog integer := (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = of_tier);
    lane_ids bigint[] := tierline.lock_lanes(of_app, of_backlog, lane_tasks, lane_keys);
    moved bigint;
BEGIN
    IF tokens IS NULL THEN
        -- If the move is lost in a crash of the server, the tasks are ready as before.
        PERFORM set_config('synchronous_commit', 'off', true);
        WITH taken AS (
            DELETE FROM tierline.ready USING unnest(ids, lane_of) AS known (id, lane)
            WHERE ready.id = known.id AND backlog = of_backlog RETURNING ready.*, known.lane
        ) INSERT INTO tierline.parked (id, lane, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload)
        SELECT id, lane_ids[lane], due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload
        FROM taken ON CONFLICT (id) DO NOTHING;
    ELSE
        WITH taken AS (
            DELETE FROM tierline.running USING unnest(ids, tokens, lane_of) AS known (id, token, lane)
            WHERE running.id = known.id AND running.token = known.token RETURNING running.*, known.lane
        ) INSERT INTO tierline.parked (id, lane, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload)
        SELECT id, lane_ids[lane], due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload
        FROM taken ON CONFLICT (id) DO NOTHING;
    END IF;
    GET DIAGNOSTICS moved = ROW_COUNT;
    PERFORM tierline.place_lanes(lane_ids, false);
    RETURN moved;
END
$$;

-- Inserts tasks into their lanes that waited in the queue of their tier. They are due now, in the order in which they come.
--
-- Where tasks wait already in all of these lanes, their first tasks stay the same, and a share lock keeps the lanes in their
-- places. Several processes that park the backlog of one key would otherwise wait for each other's commits.
CREATE FUNCTION tierline.park_new(
    of_app text, of_tier text, lane_tasks text[], lane_keys text[],
    ids uuid[], lane_of integer[], ranks smallint[], tasks text[], names text[], all_properties bytea[],
    payloads bytea[]
) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_backlog integer := (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = of_tier);
    lane_ids bigint[];
    first_rank smallint := (SELECT min(rank) FROM unnest(ranks) AS new (rank));
    is_placed bool := false;
BEGIN
    IF 0 >= ALL (ranks) THEN
        BEGIN
            SELECT array_agg(id ORDER BY task, key) INTO lane_ids FROM (
                SELECT lanes.id, lanes.task, lanes.key
                FROM unnest(lane_tasks, lane_keys) AS wanted (task, key)
                JOIN tierline.lanes ON lanes.backlog = of_backlog AND lanes.task = wanted.task AND lanes.key = wanted.key
                WHERE lanes.rank <= first_rank AND lanes.task <> '' AND lanes.turn <= statement_timestamp()
                    AND lanes.parked_at > clock_timestamp() - interval '1 second'
                ORDER BY lanes.task, lanes.key FOR SHARE OF lanes
            ) AS locked;
            is_placed := coalesce(cardinality(lane_ids), 0) = cardinality(lane_tasks);
            IF NOT is_placed THEN
                -- Releases the share locks: to upgrade them could end in a deadlock.
                RAISE SQLSTATE 'TL002';
            END IF;
        EXCEPTION WHEN SQLSTATE 'TL002' THEN
            NULL;
        END;
    END IF;
    IF NOT is_placed THEN
        lane_ids := tierline.lock_lanes(of_app, of_backlog, lane_tasks, lane_keys);
    END IF;
    INSERT INTO tierline.parked (id, lane, due_at, backlog, rank, task, name, properties, payload)
    SELECT id, lane_ids[lane], statement_timestamp() + number * interval '1 microsecond', of_backlog, rank, task, name, properties,
        payload
    FROM unnest(ids, lane_of, ranks, tasks, names, all_properties, payloads) WITH ORDINALITY
        AS new (id, lane, rank, task, name, properties, payload, number)
    -- In one order everywhere: two processes that insert the same tasks would otherwise wait for each other.
    ORDER BY id
    ON CONFLICT (id) DO NOTHING;
    IF NOT is_placed THEN
        PERFORM tierline.place_lanes(lane_ids, false);
    END IF;
    RETURN txid_current();
END
$$;

-- Claims tasks that wait in lanes. For each task of `lane_tasks` (in their order; empty: all of the tier): how many at most,
-- and how many of a key may run at once (NULL: the lane without a key, and in a tier with `fair` all keys in turns).
-- `are_suspects`: whether to claim tasks that may kill their worker, or the others. A row without an id says that lanes of its
-- task were locked by others.
--
-- The runs of a key are counted in all tiers, while its advisory lock is held, and in a statement after that: it sees what
-- was committed before the lock. One statement would count runs as they were before.
CREATE FUNCTION tierline.claim_parked(
    of_app text, of_tier text, of_worker bigint, of_token bigint, ttls float8[],
    lane_tasks text[], most integer[], places integer[],
    are_suspects bool, most_bytes bigint
) RETURNS TABLE (
    id uuid, token bigint, due_at timestamptz, rank smallint, is_held bool, first_backlog integer, task text, name text,
    properties bytea, payload bytea, is_expired bool, number bigint
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_backlog integer := (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = of_tier);
    lowest smallint := CASE WHEN are_suspects THEN 1 ELSE -255 END;
    highest smallint := CASE WHEN are_suspects THEN 1000 ELSE 0 END;
    bytes_left bigint := most_bytes;
    locked bigint[];
    each integer;
    lane_task text;
    limit_of_key integer;
    wanted integer;
    ttl float8;
    claimed_rows bigint;
BEGIN
    FOR index IN 1 .. cardinality(lane_tasks) LOOP
        EXIT WHEN bytes_left <= 0;
        lane_task := lane_tasks[index];
        limit_of_key := places[index];
        wanted := most[index];
        ttl := ttls[index];
        IF lane_task <> '' AND limit_of_key IS NULL THEN
            -- Its tasks are claimed like ready ones, and nobody has to count them.
            SELECT array_agg(id) INTO locked FROM tierline.lanes
            WHERE backlog = of_backlog AND task = lane_task AND key = '' AND (rank IS NOT NULL OR has_suspects);
        ELSIF are_suspects THEN
            SELECT array_agg(id) INTO locked FROM (
                SELECT id FROM tierline.lanes
                WHERE backlog = of_backlog AND task = lane_task AND has_suspects AND (limit_of_key IS NULL OR key <> ''
                    AND (SELECT count(*) FROM tierline.running WHERE running.counted = lanes.counted) < limit_of_key
                    AND pg_try_advisory_xact_lock(lanes.counted))
                LIMIT wanted FOR UPDATE SKIP LOCKED
            ) AS lanes;
        ELSE
            SELECT array_agg(id) INTO locked FROM (
                SELECT id FROM tierline.lanes
                WHERE backlog = of_backlog AND task = lane_task AND rank IS NOT NULL AND (limit_of_key IS NULL OR key <> ''
                    AND (SELECT count(*) FROM tierline.running WHERE running.counted = lanes.counted) < limit_of_key
                    AND pg_try_advisory_xact_lock(lanes.counted))
                ORDER BY rank, turn, id LIMIT wanted FOR UPDATE SKIP LOCKED
            ) AS lanes;
        END IF;
        claimed_rows := 0;
        IF locked IS NOT NULL THEN
            each := coalesce(limit_of_key, (wanted + cardinality(locked) - 1) / cardinality(locked));
            -- Nothing is joined with itself: Postgres would compare each row with each.
            FOR id, token, due_at, rank, is_held, first_backlog, task, name, properties, payload, is_expired IN
                WITH free AS MATERIALIZED (
                    SELECT open.lane, open.turn, lanes.counted, CASE WHEN limit_of_key IS NULL THEN each
                        ELSE each - (SELECT count(*) FROM tierline.running WHERE running.counted = lanes.counted) END AS room
                    FROM unnest(locked) WITH ORDINALITY AS open (lane, turn) JOIN tierline.lanes ON lanes.id = open.lane
                ), picked AS MATERIALIZED (
                    SELECT free.lane, free.turn, free.counted, found.*,
                        row_number() OVER (PARTITION BY free.lane ORDER BY found.rank, found.due_at, found.id) AS round
                    FROM free CROSS JOIN LATERAL (
                        SELECT ctid AS place, id, rank, due_at,
                            octet_length(payload) + coalesce(octet_length(properties), 0) AS size
                        FROM tierline.parked WHERE parked.lane = free.lane AND rank BETWEEN lowest AND highest
                        ORDER BY rank, due_at, id LIMIT greatest(free.room, 0) FOR UPDATE SKIP LOCKED
                    ) AS found
                ), ordered AS MATERIALIZED (
                    SELECT place, counted, row_number() OVER turns AS number, sum(size) OVER turns - size AS before
                    FROM picked WINDOW turns AS (ORDER BY round, turn)
                ), taken AS (
                    DELETE FROM tierline.parked USING ordered
                    WHERE parked.ctid = ordered.place AND ordered.before < bytes_left AND ordered.number <= wanted
                    RETURNING parked.*, ordered.counted, ordered.number
                ), claimed AS (
                    INSERT INTO tierline.running
                        (id, due_at, token, worker, rank, is_held, backlog, first_backlog, task, name, properties, payload, counted)
                    SELECT id, due_at, of_token, of_worker, rank, is_held, backlog, first_backlog, task, name,
                        properties, payload, CASE WHEN limit_of_key IS NOT NULL THEN counted END
                    FROM taken ORDER BY number ON CONFLICT (id) DO NOTHING
                    RETURNING running.*
                ) SELECT id, token, due_at, rank, is_held, first_backlog, task, name, properties, payload,
                    coalesce(rank <= 0 AND due_at < now() - make_interval(secs => ttl), false)
                FROM claimed
            LOOP
                claimed_rows := claimed_rows + 1;
                number := claimed_rows;
                bytes_left := bytes_left - octet_length(payload) - coalesce(octet_length(properties), 0);
                RETURN NEXT;
            END LOOP;
            IF lane_task <> '' AND limit_of_key IS NULL THEN
                CONTINUE WHEN claimed_rows = wanted;
                -- It may be empty now. If another transaction has locked it, the next claim sets its place.
                SELECT array_agg(id) INTO locked FROM (
                    SELECT id FROM tierline.lanes WHERE id = ANY(locked) FOR UPDATE SKIP LOCKED
                ) AS lanes;
            END IF;
            PERFORM tierline.place_lanes(locked, true);
        END IF;
        IF lane_task = '' AND NOT are_suspects AND claimed_rows < wanted AND EXISTS (
            SELECT FROM tierline.lanes
            WHERE backlog = of_backlog AND task = '' AND rank IS NOT NULL AND NOT coalesce(id = ANY(locked), false)
        ) THEN
            id := NULL;
            task := lane_task;
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;

-- Makes tasks of the lanes of a task ready again (empty: of all lanes of the tier), the first of each lane first. `keys`: of
-- which lanes, all, those without a key (none) or those with one (some). A lane that tasks were moved to within the last
-- `quiet` seconds is left alone: another process holds them back. Returns the first task of each rank, and in a row without a
-- rank that there are more.
CREATE FUNCTION tierline.unpark(
    of_app text, of_tier text, lane_task text, keys text, quiet float8, most integer, most_bytes bigint
) RETURNS TABLE (rank smallint, first timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_backlog integer := (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = of_tier);
    before timestamptz := clock_timestamp() - make_interval(secs => quiet);
    locked bigint[];
    each integer;
BEGIN
    SELECT array_agg(id) INTO locked FROM (
        SELECT id FROM tierline.lanes WHERE id = ANY(ARRAY(
            (SELECT id FROM tierline.lanes WHERE backlog = of_backlog AND task = lane_task AND rank IS NOT NULL
                AND (keys = 'all' OR (key = '') = (keys = 'none')) AND parked_at <= before
            ORDER BY rank, turn, id LIMIT 100)
            UNION ALL
            (SELECT id FROM tierline.lanes WHERE backlog = of_backlog AND task = lane_task AND has_suspects
                AND (keys = 'all' OR (key = '') = (keys = 'none')) AND parked_at <= before
            LIMIT 100)
        )) FOR UPDATE SKIP LOCKED
    ) AS lanes;
    IF locked IS NULL THEN
        RETURN;
    END IF;
    each := greatest(1, most / cardinality(locked));
    RETURN QUERY WITH picked AS MATERIALIZED (
        SELECT place, sum(size) OVER (ORDER BY round, rank, due_at, id) - size AS before FROM (
            SELECT found.*, row_number() OVER (PARTITION BY open.lane ORDER BY found.rank, found.due_at, found.id) AS round
            FROM unnest(locked) AS open (lane) CROSS JOIN LATERAL (
                SELECT ctid AS place, id, rank, due_at, octet_length(payload) + coalesce(octet_length(properties), 0) AS size
                FROM tierline.parked WHERE parked.lane = open.lane
                ORDER BY rank, due_at, id LIMIT each FOR UPDATE SKIP LOCKED
            ) AS found
        ) AS found
    ), taken AS (
        DELETE FROM tierline.parked
        WHERE ctid = ANY(ARRAY(SELECT place FROM picked WHERE picked.before < most_bytes)) RETURNING parked.*
    ), moved AS (
        INSERT INTO tierline.ready (id, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload)
        SELECT id, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload FROM taken
        ON CONFLICT (id) DO NOTHING RETURNING rank, due_at
    ) SELECT moved.rank, min(moved.due_at) FROM moved GROUP BY moved.rank;
    PERFORM tierline.place_lanes(locked, false);
    RETURN QUERY SELECT NULL::smallint, NULL::timestamptz WHERE EXISTS (
        SELECT FROM tierline.lanes
        WHERE backlog = of_backlog AND task = lane_task AND rank IS NOT NULL
            AND (keys = 'all' OR (key = '') = (keys = 'none')) AND parked_at <= before);
END
$$;
