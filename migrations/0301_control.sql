-- What operators change at run time: pauses, limits, overrides.
--
-- One that has ended stays for a time: a task that waited through a pause is not dead-lettered for that, and rows that an
-- override has moved can be moved again.
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
-- Each process reads what is in force twice a second, whatever has ended.
CREATE INDEX controls_by_end ON tierline.controls (app, until);

-- How processes divide the limits of tiers and tasks. Few rows; each is written some times a second while something starts.
CREATE TABLE tierline.limits (
    app text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('tier', 'task')),
    name text NOT NULL,
    -- Rises with each change. Optimistic lock: an update names the version that it read.
    version bigint NOT NULL DEFAULT 1,
    -- The shares of the processes and the unassigned rest, as JSON.
    state text NOT NULL,
    PRIMARY KEY (app, kind, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0);

-- Which processes live, and what each can run. NULL: the process is of a release that does not say.
ALTER TABLE tierline.workers
    -- The groups that it serves: [{"name": "bulk", "slots": 4, "tiers": ["exports"]}].
    ADD COLUMN groups jsonb,
    -- The tasks that it has handlers for.
    ADD COLUMN tasks text[],
    -- How many seconds each of them may run.
    ADD COLUMN timeouts double precision[];

-- Whether the map has the tier, as far as the database has a copy of it: an override to a tier that left the map ends with it.
ALTER TABLE tierline.backlogs ADD COLUMN is_mapped boolean NOT NULL DEFAULT true;

-- The override of a task that is in force. One of the name counts before one of a prefix, and a longer prefix before a shorter
-- one. It runs with the rights of the owner: a producer that may publish must not need the right to read what operators do.
CREATE FUNCTION tierline.override_of(
    of_app text, of_task text,
    OUT tier text, OUT priority smallint, OUT max_priority smallint, OUT usual_priority smallint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT setting ->> 'tier', (setting ->> 'priority')::smallint, (setting ->> 'max_priority')::smallint,
        (setting ->> 'usual_priority')::smallint
    FROM tierline.controls
    WHERE app = of_app AND kind = 'override' AND (until IS NULL OR until > clock_timestamp())
        AND (target_kind = 'task' AND target = of_task OR target_kind = 'prefix' AND starts_with(of_task, target))
    ORDER BY target_kind = 'task' DESC, octet_length(target) DESC LIMIT 1
$$;

-- Publishes a task as a row of its tier, or of the tier that an override gives it, within the transaction of the caller.
-- Returns the task's id.
CREATE OR REPLACE FUNCTION tierline.publish(
    app text,
    task text,
    payload jsonb,
    delay interval DEFAULT '0',
    priority integer DEFAULT NULL,
    expires interval DEFAULT NULL,
    headers jsonb DEFAULT '{}',
    id text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    mapped tierline.tasks;
    overridden record;
    highest smallint;
    backlog_id integer;
    now_ms bigint := floor(extract(epoch FROM clock_timestamp()) * 1000);
    body bytea := convert_to(payload::text, 'UTF8');
    row_id uuid;
    task_id text;
    due timestamptz;
    rank_of smallint;
    own bytea := '';
    encoded bytea;
    header record;
BEGIN
    delay := coalesce(delay, '0');
    SELECT * INTO mapped FROM tierline.tasks WHERE tasks.app = publish.app AND tasks.task = publish.task;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'cannot publish task "%" of app "%": it is not mapped to a tier', task, app
            USING ERRCODE = 'undefined_object',
                HINT = 'Add it to [tasks] in the map, and run "tierline topology apply FILE --postgres URL".';
    END IF;
    SELECT backlogs.id AS backlog, found.priority, found.max_priority, found.usual_priority INTO overridden
    FROM tierline.override_of(publish.app, publish.task) AS found
    LEFT JOIN tierline.backlogs ON backlogs.app = publish.app AND backlogs.tier = found.tier
        AND backlogs.tier <> mapped.tier AND backlogs.is_mapped;
    backlog_id := coalesce(overridden.backlog,
        (SELECT backlogs.id FROM tierline.backlogs WHERE backlogs.app = publish.app AND backlogs.tier = mapped.tier));
    IF payload IS NULL THEN
        RAISE EXCEPTION 'cannot publish task "%": its payload is NULL', task
            USING ERRCODE = 'null_value_not_allowed', HINT = 'Give it a payload; the JSON value null is ''null''.';
    END IF;
    IF octet_length(body) > mapped.max_size THEN
        RAISE EXCEPTION 'the payload of task "%" has % bytes, and max_message_size of the map is %', task, octet_length(body), mapped.max_size
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store it elsewhere and publish where it is.';
    END IF;
    IF priority < 0 OR priority > coalesce(mapped.max_priority, -1) THEN
        RAISE EXCEPTION 'cannot publish task "%" with priority %: its tier "%" %', task, priority, mapped.tier,
                coalesce('takes 0 to ' || mapped.max_priority, 'has no priorities')
            USING ERRCODE = 'numeric_value_out_of_range';
    END IF;
    IF delay < interval '0' OR expires < interval '0' THEN
        RAISE EXCEPTION 'cannot publish task "%": a delay or an expiry must not be negative', task
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(convert_to(id, 'UTF8')) NOT BETWEEN 1 AND 255 THEN
        RAISE EXCEPTION 'cannot publish task "%": its id must have 1 to 255 bytes', task
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF jsonb_typeof(headers) <> 'object' THEN
        RAISE EXCEPTION 'cannot publish task "%": its headers must be a JSON object of texts', task
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- A UUID v7 holds the time, and the task's id is its text in Crockford's base32, behind a one bit.
    row_id := encode(substring(int8send(now_ms) FROM 3)
        || set_byte(substring(uuid_send(gen_random_uuid()) FROM 7), 0,
            112 | (get_byte(uuid_send(gen_random_uuid()), 0) & 15)), 'hex')::uuid;
    task_id := coalesce(id, (
        SELECT string_agg(substr('0123456789ABCDEFGHJKMNPQRSTVWXYZ', substr(bits, 5 * place + 1, 5)::bit(5)::integer + 1, 1), ''
            ORDER BY place)
        FROM (SELECT '01' || ('x' || replace(row_id::text, '-', ''))::bit(128)::text AS bits) AS numbered,
            generate_series(0, 25) AS place));
    rank_of := -coalesce(priority, mapped.priority);
    highest := mapped.max_priority;
    IF overridden.backlog IS NOT NULL THEN
        highest := overridden.max_priority;
        -- The nearest priority that the other tier has.
        rank_of := CASE WHEN mapped.max_priority IS NULL OR highest IS NULL THEN -overridden.usual_priority
            ELSE greatest(rank_of, -highest) END;
    END IF;
    IF overridden.priority IS NOT NULL AND highest IS NOT NULL THEN
        rank_of := -least(overridden.priority, highest);
    END IF;

    -- AMQP properties in their wire form, where the columns do not say everything.
    IF id IS NOT NULL OR expires IS NOT NULL OR headers <> '{}' THEN
        FOR header IN SELECT key, value, jsonb_typeof(value) AS type FROM jsonb_each(headers) ORDER BY key LOOP
            IF header.type <> 'string' OR octet_length(convert_to(header.key, 'UTF8')) NOT BETWEEN 1 AND 255
                OR header.key ~ '^(tierline-|x-)' OR header.key IN ('CC', 'BCC') THEN
                RAISE EXCEPTION 'cannot publish task "%": the header "%" is reserved, too long, or no text', task, header.key
                    USING ERRCODE = 'invalid_parameter_value';
            END IF;
            encoded := convert_to(header.value #>> '{}', 'UTF8');
            own := own || tierline.header(header.key, 'S', int4send(octet_length(encoded)) || encoded);
        END LOOP;
        IF octet_length(own) > 48 * 1024 THEN
            RAISE EXCEPTION 'the headers of task "%" have % bytes, and may have %', task, octet_length(own), 48 * 1024
                USING ERRCODE = 'program_limit_exceeded', HINT = 'Put large values into the payload.';
        END IF;
        own := own || tierline.header('tierline-enqueued-at', 'l', int8send(now_ms));
        IF expires IS NOT NULL THEN
            own := own || tierline.header('tierline-expires-at', 'l',
                int8send(now_ms + floor(extract(epoch FROM expires) * 1000)::bigint));
        END IF;
        -- The flags of: headers, delivery mode, priority, message id, type.
        encoded := int2send(14496::smallint) || int4send(octet_length(own)) || own || '\x02'
            || substring(int2send(-rank_of) FROM 2)
            || substring(int2send(octet_length(convert_to(task_id, 'UTF8'))::smallint) FROM 2) || convert_to(task_id, 'UTF8')
            || substring(int2send(octet_length(convert_to(task, 'UTF8'))::smallint) FROM 2) || convert_to(task, 'UTF8');
    ELSE
        encoded := NULL;
    END IF;

    due := clock_timestamp() + delay;
    IF delay > interval '0' THEN
        INSERT INTO tierline.scheduled (id, due_at, backlog, rank, task, name, properties, payload)
        VALUES (row_id, due, backlog_id, rank_of, task, id, encoded, body);
    ELSE
        INSERT INTO tierline.ready (id, due_at, backlog, rank, task, name, properties, payload)
        VALUES (row_id, due, backlog_id, rank_of, task, id, encoded, body);
    END IF;
    RETURN task_id;
END
$$;
