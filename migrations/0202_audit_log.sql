-- What operators did: one entry for each action, for ever.
CREATE TABLE tierline.audit_log (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    who text NOT NULL,
    why text NOT NULL,
    -- What was done: "cancel task", "cancel tasks".
    action text NOT NULL,
    -- What it was done to: an id, a filter, a tier.
    subject jsonb NOT NULL,
    -- What it was before and after, where that is known.
    before jsonb,
    after jsonb
);
CREATE INDEX audit_log_by_time ON tierline.audit_log (app, id DESC);
