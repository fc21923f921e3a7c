-- A schedule: what was declared for it, what is in force, and where it stands.
CREATE TABLE tierline.schedules (
    app text NOT NULL,
    name text NOT NULL,
    -- In force: what was declared, unless somebody changed it since.
    definition jsonb NOT NULL,
    -- As the file or the code said it last: when that says something new, it is in force again.
    declared jsonb NOT NULL,
    origin text NOT NULL CHECK (origin IN ('file', 'code')),
    -- The first run that was neither published nor given up. None: paused, gone, or it has no next.
    next_due timestamptz,
    -- The latest run that was published or given up.
    last_due timestamptz,
    last_published timestamptz,
    published bigint NOT NULL DEFAULT 0,
    missed bigint NOT NULL DEFAULT 0,
    paused_at timestamptz,
    paused_by text,
    -- Since when the file does not have it any more.
    gone_at timestamptz,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_by text NOT NULL,
    PRIMARY KEY (app, name)
);

-- What is due is found without looking at what is not.
CREATE INDEX schedules_by_next_due ON tierline.schedules (app, next_due) WHERE next_due IS NOT NULL;

-- Who did what to a schedule, and when.
CREATE TABLE tierline.schedule_changes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    name text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    by text NOT NULL,
    what text NOT NULL,
    definition jsonb
);

CREATE INDEX schedule_changes_by_name ON tierline.schedule_changes (app, name, id);

-- Which process publishes the runs of an app.
CREATE TABLE tierline.schedule_leaders (
    app text PRIMARY KEY,
    holder text NOT NULL,
    -- Raised whenever the holder changes: an old holder is known by it.
    epoch bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    -- When the holder was last seen, and since when there was one without a longer gap.
    seen_at timestamptz NOT NULL,
    led_since timestamptz NOT NULL
);
