-- What the map says of each task, for tierline.publish. Every process that applies its map brings it up to date.
CREATE TABLE tierline.tasks (
    app text NOT NULL,
    task text NOT NULL,
    tier text NOT NULL,
    priority smallint NOT NULL,
    -- NULL: the tier has no priorities.
    max_priority smallint,
    -- The largest payload, in bytes.
    max_size bigint NOT NULL,
    PRIMARY KEY (app, task)
);

-- A header of a message: its name, its type and its value.
CREATE FUNCTION tierline.header(name text, type "char", value bytea) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN substring(int2send(octet_length(convert_to(name, 'UTF8'))::smallint) FROM 2) || convert_to(name, 'UTF8')
    || convert_to(type::text, 'UTF8') || value;

-- Publishes a task as a row of its tier, within the transaction of the caller. Returns the task's id.
CREATE FUNCTION tierline.publish(
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
    SELECT backlogs.id INTO backlog_id FROM tierline.backlogs WHERE backlogs.app = publish.app AND backlogs.tier = mapped.tier;
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
COMMENT ON FUNCTION tierline.publish IS 'Publishes a task of the map as a row of its tier, within this transaction.';
