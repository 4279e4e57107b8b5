-- The ledger's first tables: who runs a pipeline, and how far each partition has come.

create schema if not exists sideline;

create table sideline.migrations (
    number integer primary key,
    name text not null,
    applied_at timestamptz not null default now()
);

-- One row a pipeline. The epoch grows with every driver: it fences the one before.
create table sideline.pipelines (
    name text primary key,
    epoch bigint not null default 0,
    state text not null default 'stopped'
        check (state in ('running', 'stopped', 'failed')),
    note text,
    handler_version text,
    topics text[] not null default '{}',
    sink text,
    delivery text,
    driver_host text,
    driver_pid integer,
    driver_backend integer,
    driver_since timestamptz,
    stop_requested boolean not null default false,
    -- As the driver last saw it.
    events_per_second double precision not null default 0,
    updated_at timestamptz not null default now()
);

-- One row a worker process: its sign of life, independent of what it commits.
create table sideline.workers (
    worker uuid primary key,
    pipeline text not null,
    host text not null,
    pid integer not null,
    beat_at timestamptz not null default clock_timestamp()
);

-- One row a partition: progress, owner and counters, written in the slice's own transaction.
-- Most of a page is left free, so that every update stays on it and no index is touched.
create table sideline.progress (
    pipeline text not null references sideline.pipelines (name),
    topic text not null,
    partition integer not null check (partition >= 0),
    topic_id text,
    next_offset bigint not null check (next_offset >= 0),
    -- (epoch, round, attempt): a take requires strictly more than the row holds.
    lease bigint[] not null default '{0}',
    owner uuid,
    worker uuid,
    backend_pid integer,
    backend_start timestamptz,
    released boolean not null default true,
    -- A partition that a topic gained: {"0": 120} waits until partition 0 has passed offset 120.
    waits_for jsonb,
    -- A partition that backs off is not leased before this time.
    due_at timestamptz,
    attempts integer not null default 0,
    trouble text,
    consumed bigint not null default 0,
    applied bigint not null default 0,
    filtered bigint not null default 0,
    skipped bigint not null default 0,
    unknown bigint not null default 0,
    event_at timestamptz,
    updated_at timestamptz not null default now(),
    primary key (pipeline, topic, partition),
    check (consumed = applied + filtered + skipped + unknown)
) with (fillfactor = 10);
