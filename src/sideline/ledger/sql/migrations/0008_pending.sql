-- Where effects are records of Kafka: what a slice changes here once Kafka has committed it.

alter table sideline.progress
    -- The number of the last slice that was begun, drawn under the row's lock and never again;
    -- and of the last one that was applied.
    add column slice_number bigint not null default 0,
    add column applied_number bigint not null default 0,
    -- What slice_number changes in this row and elsewhere, while nobody has applied or dropped it.
    add column pending jsonb,
    -- Numbers count from 0 again where a ledger was made anew: Kafka's word about another one
    -- means nothing here.
    add column mark text not null default md5(random()::text || clock_timestamp()::text),
    add constraint numbers_in_order check (applied_number <= slice_number);

alter table sideline.events
    -- Pending: named by a slice of this partition that is not applied yet. Nobody else moves it.
    add column pending_topic text,
    add column pending_partition integer,
    -- What it is when the slice is applied; of one that it found here, what it was before.
    add column becomes text check (becomes in ('parked', 'retrying', 'dead')),
    -- Written by that slice: dropped with it.
    add column fresh boolean not null default false,
    drop constraint events_state_check,
    add constraint events_state_check check (
        state in ('pending', 'parked', 'retrying', 'dead', 'skipped', 'discarded', 'resolved')
    ),
    drop constraint events_check,
    add constraint queued check (queue is null or state in ('parked', 'pending')),
    add constraint pending_by_one check (
        (state = 'pending') = (becomes is not null)
        and (state = 'pending') = (pending_topic is not null)
        and (state = 'pending') = (pending_partition is not null)
        and (state = 'pending' or not fresh)
    );
create index events_pending on sideline.events (pipeline, pending_topic, pending_partition)
    where state = 'pending';
create index events_pending_in_queue on sideline.events (queue, place)
    where state = 'pending' and queue is not null;
