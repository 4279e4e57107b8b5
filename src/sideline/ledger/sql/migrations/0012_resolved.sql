-- What came back leaves the table of those that wait, and a queue's last rites cost less.

-- One row an event that waited in a queue and was applied. Moved here, not rewritten there: half
-- the price, and the tables of what waits stay as small as what waits. Its bytes are not kept: it
-- is applied. Events whose copy is in a topic, and those that stood alone, stay where they were.
create table sideline.resolved (
    pipeline text not null,
    topic text not null,
    partition integer not null,
    "offset" bigint not null,
    incarnation integer not null,
    place bigint not null,
    -- The queue that it waited in, and the operation that released it.
    queue bigint not null,
    operation bigint not null,
    why text not null,
    stage text,
    error text,
    fingerprint text,
    -- That it failed with, or waited under.
    handler_version text not null,
    timestamp_ms bigint not null,
    attempts integer not null,
    generation integer not null,
    parked_at timestamptz not null,
    updated_at timestamptz not null default now()
);
-- Offsets are nearly unique by themselves: names in the index would double its price.
create index resolved_by_offset on sideline.resolved ("offset", partition);
-- Rows come in the order of time and leave in it.
create index resolved_to_clean on sideline.resolved using brin (updated_at);

-- Whatever the ledger knows of events, with those that came back.
create view sideline.known_events as
select pipeline, topic, partition, "offset", incarnation, place, queue, former_queue, state, why,
       key, value, header_names, header_values, timestamp_ms, held_in, stage, error, message,
       traceback, fingerprint, handler_version, attempts, generation, parked_at, updated_at,
       erased_at
from sideline.events
union all
select pipeline, topic, partition, "offset", incarnation, place, null, queue, 'resolved', why,
       null, null, '{}', '{}', timestamp_ms, 'gone', stage, error, null,
       null, fingerprint, handler_version, attempts, generation, parked_at, updated_at,
       null
from sideline.resolved;

-- Items that came to their end are not marked one by one: all of a home up to this number are over,
-- and those of them that are still called waiting are done.
alter table sideline.operation_counts
    add column seen bigint not null default -1;

alter table sideline.events
    -- How many workers have died with it in hand since it was released.
    add column deaths integer not null default 0;

-- A queue gets longer and shorter all the time: with room on its page no index is touched.
alter table sideline.queues set (fillfactor = 70);

-- No queue may be forgotten while an event waits in it or a key points to it, and nobody may wait
-- in a queue that is not there. As foreign keys that is asked row by row, which was most of the
-- price of ending a queue; here it is asked once a statement, under the same locks.
alter table sideline.events drop constraint events_queue_fkey;
alter table sideline.keys drop constraint keys_queue_fkey;

create function sideline.refuse_forgetting() returns trigger
language plpgsql as $$
begin
    -- One probe for each: a join could read everything that waits.
    if exists (
        select
        from gone
        cross join lateral (select from sideline.events where queue = gone.id limit 1) as waiting
    ) then
        raise foreign_key_violation using message = 'an event waits in a queue that was to end';
    end if;
    if exists (
        select
        from gone
        cross join lateral (select from sideline.keys where queue = gone.id limit 1) as pointing
    ) then
        raise foreign_key_violation using message = 'a key points to a queue that was to end';
    end if;
    return null;
end
$$;
create trigger refuse_forgetting after delete on sideline.queues
    referencing old table as gone
    for each statement execute function sideline.refuse_forgetting();

create function sideline.need_queues() returns trigger
language plpgsql as $$
begin
    -- Asked with a lock, and so one by one: nobody ends them before this transaction does.
    if exists (
        select
        from (select distinct queue from fresh where queue is not null) as wanted
        where not exists (select from sideline.queues where id = wanted.queue for key share)
    ) then
        raise foreign_key_violation using message = 'there is no such queue to wait in';
    end if;
    return null;
end
$$;
create trigger need_queues after insert on sideline.events
    referencing new table as fresh
    for each statement execute function sideline.need_queues();
create trigger need_queues after insert on sideline.keys
    referencing new table as fresh
    for each statement execute function sideline.need_queues();

create function sideline.need_queue() returns trigger
language plpgsql as $$
begin
    perform from sideline.queues where id = new.queue for key share;
    if not found then
        raise foreign_key_violation using message = 'there is no such queue to wait in';
    end if;
    return null;
end
$$;
create trigger need_queue after update of queue on sideline.events
    for each row when (new.queue is not null and new.queue is distinct from old.queue)
    execute function sideline.need_queue();
create trigger need_queue after update of queue on sideline.keys
    for each row when (new.queue is distinct from old.queue)
    execute function sideline.need_queue();
