-- Copies leave by reference: what they carry is in the ledger already.

alter table sideline.outbox
    -- A row may stand for many records with numbers in a row; its own number is the first one's.
    add column records integer not null default 1 check (records > 0),
    -- Copies of events of one topic, in the order in which they are sent: what becomes of them, and
    -- which they are. Null: the row is the record.
    add column copies_as text check (copies_as in ('retrying', 'dead')),
    add column copies_topic text,
    add column copies_partitions integer[],
    add column copies_offsets bigint[],
    add column copies_incarnations integer[],
    add constraint outbox_record_or_copies
        check (
            case
                when copies_as is null then records = 1
                else copies_topic is not null
                    and cardinality(copies_partitions) = records
                    and cardinality(copies_offsets) = records
                    and cardinality(copies_incarnations) = records
            end
        ),
    -- Whoever writes a row holds the partition's progress, which refers to the pipeline; a look at
    -- it for every row again was a third of what the ledger cost.
    drop constraint outbox_pipeline_fkey;

alter table sideline.events
    drop constraint events_pipeline_fkey;
