-- Records that leave for Kafka after COMMIT, and events on their way through retry topics.

-- One row a record. Written in a transaction that holds the progress row of its partition, sent in
-- the order of the numbers by the partition's owner, deleted when Kafka has acknowledged it.
create table sideline.outbox (
    pipeline text not null references sideline.pipelines (name),
    -- The partition whose owner sends it.
    topic text not null,
    partition integer not null,
    -- Drawn from the progress row (outbox_last), under its lock: there are no gaps.
    number bigint not null,
    to_topic text not null,
    -- Null: as the key says.
    to_partition integer,
    key bytea,
    value bytea,
    header_names text[] not null default '{}',
    header_values bytea[] not null default '{}',
    -- Null: the time at which it is sent.
    timestamp_ms bigint,
    -- The event that it is a copy of, if it is one.
    of_topic text,
    of_partition integer,
    of_offset bigint,
    written_at timestamptz not null default now(),
    primary key (pipeline, topic, partition, number),
    check ((of_topic is null) = (of_offset is null) and (of_topic is null) = (of_partition is null))
);
create index outbox_copies on sideline.outbox (pipeline, of_topic, of_partition, of_offset)
    where of_topic is not null;

-- The retry topics that a pipeline has written to. Those of an older policy are read until they
-- are empty, with the delay that they had then.
create table sideline.retry_topics (
    pipeline text not null references sideline.pipelines (name),
    topic text not null,
    source text not null,
    -- Its place in the chain, from 1.
    number integer not null check (number > 0),
    delay_ms bigint not null check (delay_ms >= 0),
    primary key (pipeline, topic)
);

alter table sideline.progress
    -- The number of the last outbox row that was written, and of the last that was acknowledged.
    add column outbox_last bigint not null default 0,
    add column outbox_sent bigint not null default 0,
    -- Why the next one cannot be sent.
    add column outbox_trouble text,
    -- Of a retry topic: copies that were read. Their events are counted where they came from.
    add column copies bigint not null default 0,
    -- How often events from next_offset on have failed in place: {"120": 2}.
    add column tries jsonb,
    add constraint outbox_in_order check (outbox_sent <= outbox_last);

alter table sideline.events
    -- Where its last copy went, and when it is due there.
    add column copy_topic text,
    add column due_at timestamptz;
create index events_retrying on sideline.events (pipeline, copy_topic, due_at)
    where state = 'retrying';

alter table sideline.causes
    -- How often an event went to a retry topic, and how many ended in the dead-letter topic.
    add column retried bigint not null default 0,
    add column dead bigint not null default 0;
