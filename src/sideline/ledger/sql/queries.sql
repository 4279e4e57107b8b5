-- Every statement that sideline sends to its own tables, by name.

-- name: schema_version
-- Which migrations a database has; fails with 42P01 where there are none.
select coalesce(max(number), 0)
from sideline.migrations

-- name: has_schema
-- Whether the ledger's first table exists. Not by to_regclass: its cache may still say no after
-- the wait for somebody else's migration, and it fails without rights on the schema.
select exists (
    select
    from pg_catalog.pg_tables
    where schemaname = 'sideline'
      and tablename = 'migrations'
)

-- name: record_migration
-- A migration was applied.
insert into sideline.migrations (number, name)
values (%(number)s, %(name)s)

-- name: lock_place
-- Hold the place of a pipeline's driver for as long as the session lives.
select pg_try_advisory_lock(%(space)s, hashtext(%(pipeline)s))

-- name: place_holder
-- The backend that holds a pipeline's place.
select locks.pid
from pg_locks as locks
where locks.locktype = 'advisory'
  and locks.database = (select oid from pg_database where datname = current_database())
  and locks.classid = %(space)s::oid
  and locks.objid = (hashtext(%(pipeline)s)::bigint & 4294967295)::oid
  and locks.objsubid = 2
  and locks.granted

-- name: pipeline
-- One pipeline.
select name, epoch, state, note, handler_version, topics, sink, delivery, driver_host, driver_pid,
       driver_backend, driver_since, stop_requested, events_per_second, updated_at
from sideline.pipelines
where name = %(pipeline)s

-- name: pipelines
-- All pipelines, with whether a driver stands.
select name, epoch, state, note, handler_version, topics, sink, delivery, driver_host, driver_pid,
       driver_backend, driver_since, stop_requested, events_per_second, updated_at
from sideline.pipelines
order by name

-- name: begin_epoch
-- A new driver: everything that an older one handed out is worth nothing from here on.
insert into sideline.pipelines (
    name, epoch, state, handler_version, topics, sink, delivery,
    driver_host, driver_pid, driver_backend, driver_since
)
values (
    %(pipeline)s, 1, 'running', %(version)s, %(topics)s, %(sink)s, %(delivery)s,
    %(host)s, %(pid)s, pg_backend_pid(), now()
)
on conflict (name) do update
set epoch = pipelines.epoch + 1,
    state = 'running',
    note = null,
    handler_version = excluded.handler_version,
    topics = excluded.topics,
    sink = excluded.sink,
    delivery = excluded.delivery,
    driver_host = excluded.driver_host,
    driver_pid = excluded.driver_pid,
    driver_backend = excluded.driver_backend,
    driver_since = excluded.driver_since,
    stop_requested = false,
    updated_at = now()
returning epoch

-- name: fence_partitions
-- Write the epoch into every progress row: partitions in backoff are fenced too. Where the old
-- owner may still be calling the outside world, it has to fall silent before they are free.
update sideline.progress
set lease = array[%(epoch)s::bigint],
    owner = null,
    released = released or %(at_once)s,
    updated_at = now()
where pipeline = %(pipeline)s

-- name: end_epoch
-- The driver ends; only its own epoch may say so.
update sideline.pipelines
set state = %(state)s,
    note = %(note)s,
    events_per_second = 0,
    stop_requested = false,
    driver_backend = null,
    updated_at = now()
where name = %(pipeline)s
  and epoch = %(epoch)s

-- name: request_stop
-- Ask the workers of this epoch to end their leases at the next slice boundary.
update sideline.pipelines
set stop_requested = true
where name = %(pipeline)s
  and epoch = %(epoch)s

-- name: driver_beat
-- How fast the pipeline goes, for whoever asks.
update sideline.pipelines
set events_per_second = %(events_per_second)s,
    updated_at = now()
where name = %(pipeline)s
  and epoch = %(epoch)s

-- name: rejoin_epoch
-- After a lost connection: whether the place is still this driver's.
update sideline.pipelines
set driver_backend = pg_backend_pid(),
    updated_at = now()
where name = %(pipeline)s
  and epoch = %(epoch)s
returning epoch

-- name: partitions
-- Progress of a pipeline's partitions.
select topic, partition, topic_id, next_offset, lease, released, waits_for, due_at, attempts,
       trouble, consumed, applied, filtered, skipped, unknown, event_at, updated_at
from sideline.progress
where pipeline = %(pipeline)s
order by topic, partition

-- name: add_partition
-- A partition's start position, stored before the first read; known partitions keep theirs.
insert into sideline.progress (pipeline, topic, partition, topic_id, next_offset, lease, waits_for)
values (
    %(pipeline)s, %(topic)s, %(partition)s, %(topic_id)s, %(next_offset)s,
    array[%(epoch)s::bigint], %(waits_for)s
)
on conflict (pipeline, topic, partition) do nothing

-- name: stop_waiting
-- The older partitions have passed the ends they had when this one appeared.
update sideline.progress
set waits_for = null
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s

-- name: accept_loss
-- A person accepted that events are gone; fenced by the driver's epoch.
update sideline.progress
set next_offset = %(next_offset)s,
    topic_id = %(topic_id)s,
    trouble = null,
    due_at = null,
    attempts = 0,
    updated_at = now()
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = array[%(epoch)s::bigint]

-- name: forget_partition
-- A person accepted that a partition is gone: its topic was made again with fewer.
delete from sideline.progress
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = array[%(epoch)s::bigint]

-- name: guess
-- Where partitions stand now, to prefetch before the take; a hint and nothing more.
select topic, partition, next_offset
from sideline.progress
where pipeline = %(pipeline)s
  and (topic, partition) in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))

-- name: take
-- Own every partition of the lease that is free: released, or its owner has no backend any more
-- (when that is enough), or its owner gave no sign of life for the grace time.
-- Locked rows belong to a transaction in flight and are left for the next try.
with free as (
    select progress.pipeline, progress.topic, progress.partition, progress.due_at
    from sideline.progress
    where progress.pipeline = %(pipeline)s
      and (progress.topic, progress.partition)
          in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))
      -- Its own already: the answer to an earlier take of this lease was lost.
      and (progress.lease < %(lease)s::bigint[] or progress.owner = %(owner)s)
      and (
          progress.released
          or progress.owner = %(owner)s
          or (
              %(replace_dead)s
              and not exists (
                  select
                  from pg_stat_activity as activity
                  where activity.pid = progress.backend_pid
                    and activity.backend_start = progress.backend_start
              )
          )
          -- After a restart of the database nobody could have given a sign yet.
          or pg_postmaster_start_time() < clock_timestamp() - %(grace)s
             and not exists (
                 select
                 from sideline.workers
                 where workers.worker = progress.worker
                   and workers.beat_at > clock_timestamp() - %(grace)s
             )
      )
    order by progress.topic, progress.partition
    for update of progress skip locked
)
update sideline.progress
set lease = %(lease)s::bigint[],
    owner = %(owner)s,
    worker = %(worker)s,
    backend_pid = pg_backend_pid(),
    backend_start = %(backend_start)s,
    released = false,
    updated_at = now()
from free
where progress.pipeline = free.pipeline
  and progress.topic = free.topic
  and progress.partition = free.partition
returning progress.topic, progress.partition, progress.next_offset, progress.ctid::text,
          progress.attempts,
          coalesce(extract(epoch from free.due_at - clock_timestamp()), 0)::float8

-- name: not_mine
-- Partitions that a higher lease, or another attempt at this one, has held: never this task's.
select topic, partition
from sideline.progress
where pipeline = %(pipeline)s
  and (topic, partition) in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))
  and lease >= %(lease)s::bigint[]
  and owner is distinct from %(owner)s

-- name: frozen_holders
-- Backends of ours that hold the row of an overdue partition in an open transaction,
-- though their worker gave no sign of life for the grace time.
select distinct activity.pid
from sideline.progress
join pg_locks as locks
  on locks.locktype = 'transactionid'
 and locks.transactionid = progress.xmax
 and locks.granted
join pg_stat_activity as activity
  on activity.pid = locks.pid
where progress.pipeline = %(pipeline)s
  and (progress.topic, progress.partition)
      in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))
  and activity.application_name like 'sideline %%'
  and activity.pid <> pg_backend_pid()
  -- Whoever holds the row only since a moment ago is not frozen: another taker, a new driver.
  and activity.xact_start < clock_timestamp() - %(grace)s
  and not exists (
      select
      from sideline.workers
      where workers.worker = progress.worker
        and workers.beat_at > clock_timestamp() - %(grace)s
  )

-- name: terminate
-- End a backend; its open transaction is rolled back.
select pg_terminate_backend(%(pid)s, %(timeout_ms)s)

-- name: fence_at
-- The first statement of a slice's transaction, by the place where the last commit left the row:
-- an index scan would walk over every version that a held snapshot keeps.
update sideline.progress
set next_offset = %(end)s,
    consumed = consumed + %(consumed)s,
    applied = applied + %(applied)s,
    filtered = filtered + %(filtered)s,
    skipped = skipped + %(skipped)s,
    unknown = unknown + %(unknown)s,
    event_at = coalesce(%(event_at)s, event_at),
    attempts = 0,
    trouble = null,
    updated_at = now()
where ctid = %(ctid)s::tid
  and pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and next_offset = %(start)s
returning ctid::text

-- name: fence
-- The same by key, where the row has moved.
update sideline.progress
set next_offset = %(end)s,
    consumed = consumed + %(consumed)s,
    applied = applied + %(applied)s,
    filtered = filtered + %(filtered)s,
    skipped = skipped + %(skipped)s,
    unknown = unknown + %(unknown)s,
    event_at = coalesce(%(event_at)s, event_at),
    attempts = 0,
    trouble = null,
    updated_at = now()
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and next_offset = %(start)s
returning ctid::text

-- name: outcome
-- After a COMMIT whose answer was lost; waits for the old backend, which may still be committing.
select next_offset, consumed, lease = %(lease)s::bigint[] and owner = %(owner)s, ctid::text
from sideline.progress
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
for update

-- name: reannounce
-- The owner has a new connection: without this the next taker would see an owner without a backend.
update sideline.progress
set backend_pid = pg_backend_pid(),
    backend_start = %(backend_start)s
where pipeline = %(pipeline)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s

-- name: release
-- The last act of a lease: its partitions are free for the next one.
update sideline.progress
set released = true,
    owner = null,
    due_at = given.due_at,
    attempts = given.attempts,
    trouble = given.trouble,
    updated_at = now()
from unnest(
    %(topics)s::text[], %(partitions)s::integer[],
    %(due_at)s::timestamptz[], %(attempts)s::integer[], %(trouble)s::text[]
) as given (topic, partition, due_at, attempts, trouble)
where progress.pipeline = %(pipeline)s
  and progress.topic = given.topic
  and progress.partition = given.partition
  and progress.lease = %(lease)s::bigint[]
  and progress.owner = %(owner)s

-- name: announce_release
-- Wake the successor that waits for these partitions.
select pg_notify(%(channel)s, '')

-- name: beat
-- A worker's sign of life.
insert into sideline.workers (worker, pipeline, host, pid)
values (%(worker)s, %(pipeline)s, %(host)s, %(pid)s)
on conflict (worker) do update
set beat_at = clock_timestamp()

-- name: farewell
-- A worker ends: it calls nobody any more.
delete from sideline.workers
where worker = %(worker)s

-- name: stop_wanted
-- Whether a worker's lease should end at the next slice boundary.
select stop_requested or epoch <> %(epoch)s
from sideline.pipelines
where name = %(pipeline)s

-- name: bury_workers
-- Rows of workers that are long gone.
delete from sideline.workers
where pipeline = %(pipeline)s
  and beat_at < clock_timestamp() - interval '1 hour'
