-- Topics of a pipeline's own, and dead letters that came from elsewhere.

alter table sideline.pipelines
    -- Stash, retry and dead-letter topics: no two pipelines have one in common.
    add column own_topics text[] not null default '{}',
    -- The stash and dead-letter topics by their sources: {"users": "users.login.stash"}.
    add column stashes jsonb not null default '{}',
    add column dead_letters jsonb not null default '{}',
    -- Its effects do not depend on the order of events: declared independent, or guarded by version.
    add column order_free boolean not null default false;

alter table sideline.events
    -- topic/partition/offset of the dead letter that it was imported from. It was consumed by
    -- somebody else and is in no counter. The pipeline may still meet the event itself, so the
    -- two are kept apart: an imported one has the incarnation -1.
    add column imported_from text,
    add constraint imported_apart check ((imported_from is null) = (incarnation >= 0)),
    -- Where its copy in the dead-letter or stash topic stands, once Kafka has acknowledged it.
    add column copy_partition integer,
    add column copy_offset bigint,
    -- Its copy was taken out of the dead-letter or stash topic.
    add column purged_at timestamptz,
    -- A tombstone took its place in the source topic.
    add column source_purged_at timestamptz;
create unique index events_imported on sideline.events (pipeline, imported_from)
    where imported_from is not null;
create index events_pointers on sideline.events (pipeline, topic, partition, "offset", timestamp_ms)
    where held_in = 'source' and state = 'parked';
create index events_dead on sideline.events (pipeline, updated_at, place)
    where state = 'dead';
