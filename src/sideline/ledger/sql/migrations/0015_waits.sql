-- What an operation waits for outlives a lease: the next one is another process.

alter table sideline.operation_counts
    -- Until then it is left alone here: for its rate, or because the outside world is broken.
    add column due_at timestamptz,
    -- How often it met a broken world, one time after the other.
    add column attempts integer not null default 0;
