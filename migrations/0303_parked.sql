-- Tasks that may not run now: they are paused, or their limit is reached. Claims of ready tasks never read them.
--
-- They wait in lanes, one for each tier, task and key. A task that is paused, or has a limit as a whole, has a lane without a
-- key. A task with a limit per key has a lane for each key, and a tier with `fair` has one for each key, of no task. So a key
-- with any number of tasks is one row to whoever looks for the next task that may run.

CREATE TABLE tierline.lanes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    backlog integer NOT NULL,
    -- Empty: all tasks of the tier.
    task text COLLATE "C" NOT NULL,
    -- Empty: it has none.
    key text COLLATE "C" NOT NULL,
    -- The rank of the first task that waits. NULL: none waits.
    rank smallint,
    -- The order among lanes of one rank: the due time of the first task that waits, or in a tier with `fair` when the key had
    -- its last turn.
    turn timestamptz,
    -- Since when no task waits. A lane is removed some time after that.
    emptied_at timestamptz,
    UNIQUE (backlog, task, key)
);
-- Lanes in which a task waits, in the order of claims.
CREATE UNIQUE INDEX lanes_order ON tierline.lanes (backlog, task, rank, turn, id) WHERE rank IS NOT NULL;
CREATE INDEX lanes_empty ON tierline.lanes (emptied_at) WHERE rank IS NULL;

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

-- The lane of a run that counts for its key. NULL: it counts for none.
ALTER TABLE tierline.running ADD COLUMN lane bigint;
CREATE INDEX running_by_lane ON tierline.running (lane) WHERE lane IS NOT NULL;

ALTER TABLE tierline.parked SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0.5);
ALTER TABLE tierline.lanes SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0);

-- Sets the place of lanes that this transaction has locked, after their tasks have changed.
CREATE FUNCTION tierline.place_lanes(lane_ids bigint[], is_fair bool, had_turn bool) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE tierline.lanes SET rank = first.rank,
        turn = CASE
            WHEN NOT is_fair THEN first.due_at
            WHEN had_turn THEN clock_timestamp()
            ELSE coalesce(lanes.turn, clock_timestamp())
        END,
        emptied_at = CASE WHEN first.rank IS NULL THEN clock_timestamp() END
    FROM unnest(lane_ids) AS changed (id) LEFT JOIN LATERAL (
        SELECT rank, due_at FROM tierline.parked WHERE lane = changed.id ORDER BY rank, due_at, id LIMIT 1
    ) AS first ON true
    WHERE lanes.id = ANY(lane_ids) AND lanes.id = changed.id;
END
$$;

-- Moves tasks that are ready, or that a worker has claimed and not begun, to their lanes. Lane `lane_of[i]` of `lane_tasks` and
-- `lane_keys` is that of task `ids[i]`; `tokens` are those of claims, or NULL for ready tasks. Lanes must come in the order of
-- their task and key: they are locked in it. Returns how many tasks moved.
CREATE FUNCTION tierline.park(
    of_app text, of_tier text, is_fair bool,
    lane_tasks text[], lane_keys text[],
    ids uuid[], lane_of integer[], tokens bigint[]
) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_backlog integer := (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = of_tier);
    lane_ids bigint[];
    moved bigint;
BEGIN
    WITH locked AS (
        INSERT INTO tierline.lanes (backlog, task, key)
        SELECT of_backlog, task, key FROM unnest(lane_tasks, lane_keys) WITH ORDINALITY AS new (task, key, number) ORDER BY number
        ON CONFLICT (backlog, task, key) DO UPDATE SET emptied_at = NULL
        RETURNING id, task, key
    ) SELECT array_agg(locked.id ORDER BY number) INTO lane_ids
    FROM unnest(lane_tasks, lane_keys) WITH ORDINALITY AS new (task, key, number)
    JOIN locked ON locked.task = new.task AND locked.key = new.key;
    IF tokens IS NULL THEN
        WITH taken AS (
            DELETE FROM tierline.ready WHERE id = ANY(ids) AND backlog = of_backlog RETURNING ready.*
        ) INSERT INTO tierline.parked (id, lane, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload)
        SELECT id, lane_ids[lane_of[array_position(ids, id)]], due_at, backlog, first_backlog, rank, is_held, task, name,
            properties, payload
        FROM taken ON CONFLICT (id) DO NOTHING;
    ELSE
        WITH taken AS (
            DELETE FROM tierline.running WHERE id = ANY(ids) AND token = tokens[array_position(ids, id)] RETURNING running.*
        ) INSERT INTO tierline.parked (id, lane, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload)
        SELECT id, lane_ids[lane_of[array_position(ids, id)]], due_at, backlog, first_backlog, rank, is_held, task, name,
            properties, payload
        FROM taken ON CONFLICT (id) DO NOTHING;
    END IF;
    GET DIAGNOSTICS moved = ROW_COUNT;
    PERFORM tierline.place_lanes(lane_ids, is_fair, false);
    RETURN moved;
END
$$;

-- Claims tasks that wait in lanes. For each task of `lane_tasks` (in their order; empty: all of the tier): how many at most, how
-- many of a key may run at once (NULL: any number), and whether its keys take turns. `are_suspects`: whether to claim tasks that
-- may kill their worker, or the others.
--
-- Lanes are locked in one statement and looked at in the next one, which sees what was committed before the lock: one
-- statement would count runs as they were before it waited.
CREATE FUNCTION tierline.claim_parked(
    of_app text, of_tier text, of_worker bigint, of_token bigint, ttls float8[],
    lane_tasks text[], most integer[], places integer[], are_fair bool,
    are_suspects bool, most_bytes bigint
) RETURNS TABLE (
    id uuid, token bigint, due_at timestamptz, rank smallint, is_held bool, first_backlog integer, task text, name text,
    properties bytea, payload bytea, is_expired bool, lane bigint, number bigint
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_backlog integer := (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = of_tier);
    lowest smallint := CASE WHEN are_suspects THEN 1 ELSE -255 END;
    highest smallint := CASE WHEN are_suspects THEN 1000 ELSE 0 END;
    locked bigint[];
    each integer;
    lane_task text;
    limit_of_key integer;
    wanted integer;
    ttl float8;
BEGIN
    FOR index IN 1 .. cardinality(lane_tasks) LOOP
        lane_task := lane_tasks[index];
        limit_of_key := places[index];
        wanted := most[index];
        ttl := ttls[index];
        IF limit_of_key IS NULL AND NOT are_fair THEN
            -- There is one lane, and who comes second waits for the first.
            SELECT array_agg(id) INTO locked FROM (
                SELECT id FROM tierline.lanes
                WHERE backlog = of_backlog AND task = lane_task AND rank BETWEEN lowest AND highest
                ORDER BY rank, turn, id LIMIT 1 FOR UPDATE
            ) AS lanes;
        ELSE
            SELECT array_agg(id) INTO locked FROM (
                SELECT id FROM tierline.lanes
                WHERE backlog = of_backlog AND task = lane_task AND rank BETWEEN lowest AND highest
                    AND (limit_of_key IS NULL
                        OR (SELECT count(*) FROM tierline.running WHERE running.lane = lanes.id) < limit_of_key)
                ORDER BY rank, turn, id LIMIT wanted FOR UPDATE SKIP LOCKED
            ) AS lanes;
        END IF;
        CONTINUE WHEN locked IS NULL;
        each := coalesce(limit_of_key, (wanted + cardinality(locked) - 1) / cardinality(locked));
        RETURN QUERY WITH free AS MATERIALIZED (
            SELECT open.lane, open.turn, CASE WHEN limit_of_key IS NULL THEN each
                ELSE each - (SELECT count(*) FROM tierline.running WHERE running.lane = open.lane) END AS room
            FROM unnest(locked) WITH ORDINALITY AS open (lane, turn)
        ), picked AS MATERIALIZED (
            SELECT free.lane, free.turn, found.*,
                row_number() OVER (PARTITION BY free.lane ORDER BY found.rank, found.due_at, found.id) AS round
            FROM free CROSS JOIN LATERAL (
                SELECT ctid AS place, id, rank, due_at,
                    octet_length(payload) + coalesce(octet_length(properties), 0) AS size
                FROM tierline.parked WHERE parked.lane = free.lane AND rank BETWEEN lowest AND highest
                ORDER BY rank, due_at, id LIMIT greatest(free.room, 0) FOR UPDATE SKIP LOCKED
            ) AS found
        ), ordered AS MATERIALIZED (
            SELECT place, id, row_number() OVER turns AS number, sum(size) OVER turns - size AS before
            FROM picked WINDOW turns AS (ORDER BY round, turn)
        ), taken AS (
            DELETE FROM tierline.parked
            WHERE ctid = ANY(ARRAY(SELECT place FROM ordered WHERE before < most_bytes AND number <= wanted)) RETURNING parked.*
        ), claimed AS (
            INSERT INTO tierline.running
                (id, due_at, token, worker, rank, is_held, backlog, first_backlog, task, name, properties, payload, lane)
            SELECT id, due_at, of_token, of_worker, rank, is_held, backlog, first_backlog, task, name, properties, payload,
                CASE WHEN limit_of_key IS NOT NULL THEN lane END
            FROM taken ON CONFLICT (id) DO NOTHING
            RETURNING running.*
        ) SELECT claimed.id, claimed.token, claimed.due_at, claimed.rank, claimed.is_held, claimed.first_backlog, claimed.task,
            claimed.name, claimed.properties, claimed.payload,
            coalesce(claimed.rank <= 0 AND claimed.due_at < now() - make_interval(secs => ttl), false), claimed.lane,
            ordered.number
        FROM claimed JOIN ordered ON ordered.id = claimed.id;
        PERFORM tierline.place_lanes(locked, are_fair, true);
    END LOOP;
END
$$;

-- Makes tasks of the lanes of a task ready again (empty: of all lanes of the tier), the first of each lane first. Returns the
-- first of each rank, and in a row without a rank whether more may wait.
CREATE FUNCTION tierline.unpark(
    of_app text, of_tier text, lane_task text, is_fair bool, most integer, most_bytes bigint
) RETURNS TABLE (rank smallint, first timestamptz)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    of_backlog integer := (SELECT id FROM tierline.backlogs WHERE app = of_app AND tier = of_tier);
    locked bigint[];
BEGIN
    SELECT array_agg(id) INTO locked FROM (
        SELECT id FROM tierline.lanes WHERE backlog = of_backlog AND task = lane_task AND rank IS NOT NULL
        ORDER BY rank, turn, id LIMIT 100 FOR UPDATE SKIP LOCKED
    ) AS lanes;
    IF locked IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY WITH picked AS MATERIALIZED (
        SELECT place, sum(size) OVER turns - size AS before, row_number() OVER turns AS number
        FROM unnest(locked) AS open (lane) CROSS JOIN LATERAL (
            SELECT ctid AS place, id, rank, due_at, octet_length(payload) + coalesce(octet_length(properties), 0) AS size
            FROM tierline.parked WHERE parked.lane = open.lane
            ORDER BY rank, due_at, id LIMIT most FOR UPDATE SKIP LOCKED
        ) AS found WINDOW turns AS (ORDER BY rank, due_at, id)
    ), taken AS (
        DELETE FROM tierline.parked
        WHERE ctid = ANY(ARRAY(SELECT place FROM picked WHERE before < most_bytes AND number <= most)) RETURNING parked.*
    ), moved AS (
        INSERT INTO tierline.ready (id, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload)
        SELECT id, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload FROM taken
        ON CONFLICT (id) DO NOTHING RETURNING rank, due_at
    ) SELECT moved.rank, min(moved.due_at) FROM moved GROUP BY moved.rank;
    PERFORM tierline.place_lanes(locked, is_fair, false);
    RETURN QUERY SELECT NULL::smallint, NULL::timestamptz
        FROM tierline.lanes WHERE backlog = of_backlog AND task = lane_task AND lanes.rank IS NOT NULL LIMIT 1;
END
$$;
