-- Marks of tasks that are done: each was written by the transaction of the handler that did the task. A copy of the task
-- that comes again is recognised by it.
CREATE TABLE tierline.completed (
    -- SHA-256 of the app, the task's name, its id, when it was enqueued, and its payload.
    key bytea PRIMARY KEY,
    app text NOT NULL,
    completed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
-- The order of removal.
CREATE INDEX completed_order ON tierline.completed (app, completed_at);
