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
       driver_backend, driver_since, stop_requested, events_per_second, paused, paused_note,
       updated_at
from sideline.pipelines
where name = %(pipeline)s

-- name: pipelines
-- All pipelines, with whether a driver stands.
select name, epoch, state, note, handler_version, topics, sink, delivery, driver_host, driver_pid,
       driver_backend, driver_since, stop_requested, events_per_second, paused, paused_note,
       updated_at
from sideline.pipelines
order by name

-- name: begin_epoch
-- A new driver: everything that an older one handed out is worth nothing from here on.
insert into sideline.pipelines (
    name, epoch, state, handler_version, topics, own_topics, stashes, dead_letters, order_free,
    sink, delivery, ids_kept,
    driver_host, driver_pid, driver_backend, driver_since
)
values (
    %(pipeline)s, 1, 'running', %(version)s, %(topics)s, %(own_topics)s, %(stashes)s,
    %(dead_letters)s, %(order_free)s, %(sink)s, %(delivery)s, %(ids_kept)s, %(host)s, %(pid)s,
    pg_backend_pid(), now()
)
on conflict (name) do update
set epoch = pipelines.epoch + 1,
    state = 'running',
    note = null,
    handler_version = excluded.handler_version,
    topics = excluded.topics,
    own_topics = excluded.own_topics,
    -- Those of an older policy still hold what was written then.
    stashes = pipelines.stashes || excluded.stashes,
    dead_letters = pipelines.dead_letters || excluded.dead_letters,
    order_free = excluded.order_free,
    sink = excluded.sink,
    delivery = excluded.delivery,
    -- Ids that are there are kept as before where nobody asks for them any more.
    ids_kept = coalesce(excluded.ids_kept, pipelines.ids_kept),
    driver_host = excluded.driver_host,
    driver_pid = excluded.driver_pid,
    driver_backend = excluded.driver_backend,
    driver_since = excluded.driver_since,
    stop_requested = false,
    updated_at = now()
returning epoch

-- name: claim_own_topics
-- Whoever names topics of its own does so one after the other.
select pg_advisory_xact_lock(hashtextextended('sideline.pipelines.own_topics', 0))

-- name: others_own_topics
-- Stash, retry and dead-letter topics of the other pipelines.
select name, own_topics
from sideline.pipelines
where name <> %(pipeline)s
  and own_topics <> '{}'

-- name: renamed_topics
-- Stash and dead-letter topics that are to have another name, and how many events the ledger still
-- knows to have a record under the old one.
select 'stash' as kind, old.value as name, events.count
from sideline.pipelines
cross join lateral jsonb_each_text(pipelines.stashes) as old
cross join lateral (
    select count(*)
    from sideline.events
    where events.pipeline = pipelines.name
      and events.topic = old.key
      and events.held_in = 'stash'
      and events.purged_at is null
      and events.erased_at is null
) as events
where pipelines.name = %(pipeline)s
  and %(stashes)s::jsonb ->> old.key <> old.value
  and events.count > 0
union all
select 'dead-letter', old.value, events.count
from sideline.pipelines
cross join lateral jsonb_each_text(pipelines.dead_letters) as old
cross join lateral (
    select count(*)
    from sideline.events
    where events.pipeline = pipelines.name
      and events.topic = old.key
      and events.copy_topic = old.value
      and events.purged_at is null
) as events
where pipelines.name = %(pipeline)s
  and %(dead_letters)s::jsonb ->> old.key <> old.value
  and events.count > 0

-- name: know_pipeline
-- A pipeline that has not run yet, so that rows can refer to it.
insert into sideline.pipelines (name, topics, order_free)
values (%(pipeline)s, %(topics)s, %(order_free)s)
on conflict (name) do nothing

-- name: stashes_of_pipeline
-- Its stash and dead-letter topics, by their sources.
select stashes, dead_letters
from sideline.pipelines
where name = %(pipeline)s

-- name: topics_of_pipeline
-- What it reads, as declared when it last ran.
select topics
from sideline.pipelines
where name = %(pipeline)s

-- name: import_dead
-- Dead letters that somebody else wrote, under the place that each is to have. One that is here
-- already, or whose place is taken, is left out. Their causes are counted; how many came in.
with taken_in as (
    insert into sideline.events (
        pipeline, topic, partition, "offset", incarnation, imported_from, state, why,
        handler_version, key, value, header_names, header_values, timestamp_ms, held_in,
        stage, error, message, traceback, fingerprint, attempts
    )
    select %(pipeline)s, given.topic, given.partition, given."offset", -1, given.imported_from,
           'dead', 'failed', '', given.key, given.value, given.header_names::text[],
           given.header_values::bytea[], given.timestamp_ms, given.held_in, given.stage,
           given.error, given.message, given.traceback, given.fingerprint, given.attempts
    from unnest(
        %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[], %(sources)s::text[],
        %(keys)s::bytea[], %(values)s::bytea[], %(header_names)s::text[], %(header_values)s::text[],
        %(timestamps)s::bigint[], %(held)s::text[], %(stages)s::text[], %(errors)s::text[],
        %(messages)s::text[], %(tracebacks)s::text[], %(fingerprints)s::text[],
        %(attempts)s::integer[]
    ) with ordinality as given (
        topic, partition, "offset", imported_from, key, value, header_names, header_values,
        timestamp_ms, held_in, stage, error, message, traceback, fingerprint, attempts, number
    )
    order by given.number
    on conflict do nothing
    returning topic, partition, "offset", place, key, fingerprint, error, stage, message, traceback
), counted as (
    insert into sideline.causes (
        pipeline, topic, partition, fingerprint, error, stage, place, message, traceback,
        last_offset, last_key, dead
    )
    select %(pipeline)s, topic, partition, fingerprint,
           (array_agg(error order by place desc))[1],
           (array_agg(stage order by place desc))[1],
           '',
           (array_agg(message order by place desc))[1],
           (array_agg(traceback order by place desc))[1],
           (array_agg("offset" order by place desc))[1],
           (array_agg(key order by place desc))[1],
           count(*)
    from taken_in
    group by topic, partition, fingerprint
    order by topic, partition, fingerprint
    on conflict (pipeline, fingerprint, topic, partition) do update
    set message = excluded.message,
        traceback = excluded.traceback,
        last_offset = excluded.last_offset,
        last_key = excluded.last_key,
        dead = causes.dead + excluded.dead,
        last_at = now()
)
select count(*)
from taken_in

-- name: imported_before
-- Which of these dead letters are here already.
select imported_from
from sideline.events
where pipeline = %(pipeline)s
  and imported_from = any(%(sources)s::text[])

-- name: known_origins
-- Which of these events the ledger knows already, met by the pipeline itself or imported.
select distinct events.topic, events.partition, events."offset"
from unnest(%(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[])
    as given (topic, partition, "offset")
join sideline.known_events as events
  on events.pipeline = %(pipeline)s
 and events.topic = given.topic
 and events.partition = given.partition
 and events."offset" = given."offset"

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
       trouble, stuck_at, paused, consumed, applied, filtered, skipped, unknown, parked, retrying,
       dead, discarded, duplicate, aside, event_at, updated_at, held_for, copies,
       outbox_last - outbox_sent,
       outbox_trouble
from sideline.progress
where pipeline = %(pipeline)s
order by topic, partition

-- name: add_partition
-- A partition's start position, stored before the first read; known partitions keep theirs.
insert into sideline.progress (
    pipeline, topic, partition, topic_id, next_offset, lease, waits_for, held_for
)
values (
    %(pipeline)s, %(topic)s, %(partition)s, %(topic_id)s, %(next_offset)s,
    array[%(epoch)s::bigint], %(waits_for)s,
    -- Keys may move there that a run still brings up to date elsewhere.
    (
        select max(others.held_for)
        from sideline.progress as others
        where others.pipeline = %(pipeline)s
          and others.topic = %(topic)s
    )
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
    incarnation = incarnation + (topic_id is distinct from %(topic_id)s)::integer,
    topic_id = %(topic_id)s,
    -- It meant the old log.
    waits_for = case when topic_id = %(topic_id)s then waits_for end,
    trouble = null,
    stuck_at = null,
    park_at = null,
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
    select progress.pipeline, progress.topic, progress.partition, progress.due_at,
           progress.worker
    from sideline.progress
    where progress.pipeline = %(pipeline)s
      and (progress.topic, progress.partition)
          in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))
      -- Nobody takes what waits for a run that applies a range again.
      and progress.held_for is null
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
          coalesce(extract(epoch from free.due_at - clock_timestamp()), 0)::float8,
          progress.stuck_at, progress.park_at, progress.park_reason, progress.aside,
          progress.aside_version, progress.shared, progress.incarnation, progress.guard,
          progress.outbox_last, progress.outbox_sent, progress.tries,
          progress.slice_number, progress.applied_number, progress.pending::text, progress.mark,
          free.worker is not distinct from %(worker)s

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
    parked = parked + %(parked)s,
    retrying = retrying + %(retrying)s,
    dead = dead + %(dead)s,
    discarded = discarded + %(discarded)s,
    duplicate = duplicate + %(duplicate)s,
    copies = copies + %(copies)s,
    aside = aside + %(aside)s,
    aside_version = aside_version + %(aside)s,
    guard = coalesce(%(guard)s::integer[], guard),
    event_at = coalesce(%(event_at)s, event_at),
    -- Whoever only stands its ground still waits for what it waits for.
    attempts = case when next_offset < %(end)s then 0 else attempts end,
    trouble = case when next_offset >= %(end)s then trouble end,
    stuck_at = case when next_offset >= %(end)s then stuck_at end,
    park_at = case when park_at >= %(end)s then park_at end,
    updated_at = now()
where ctid = %(ctid)s::tid
  and pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and next_offset = %(start)s
returning ctid::text, shared

-- name: fence
-- The same by key, where the row has moved.
update sideline.progress
set next_offset = %(end)s,
    consumed = consumed + %(consumed)s,
    applied = applied + %(applied)s,
    filtered = filtered + %(filtered)s,
    skipped = skipped + %(skipped)s,
    unknown = unknown + %(unknown)s,
    parked = parked + %(parked)s,
    retrying = retrying + %(retrying)s,
    dead = dead + %(dead)s,
    discarded = discarded + %(discarded)s,
    duplicate = duplicate + %(duplicate)s,
    copies = copies + %(copies)s,
    aside = aside + %(aside)s,
    aside_version = aside_version + %(aside)s,
    guard = coalesce(%(guard)s::integer[], guard),
    event_at = coalesce(%(event_at)s, event_at),
    -- Whoever only stands its ground still waits for what it waits for.
    attempts = case when next_offset < %(end)s then 0 else attempts end,
    trouble = case when next_offset >= %(end)s then trouble end,
    stuck_at = case when next_offset >= %(end)s then stuck_at end,
    park_at = case when park_at >= %(end)s then park_at end,
    updated_at = now()
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and next_offset = %(start)s
returning ctid::text, shared

-- name: outcome
-- After a COMMIT whose answer was lost; waits for the old backend, which may still be committing.
select next_offset, consumed, lease = %(lease)s::bigint[] and owner = %(owner)s, ctid::text,
       aside, aside_version, guard, outbox_last, outbox_sent,
       slice_number, applied_number, pending::text
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
    -- Whoever wants the event set aside does not wait for the next attempt.
    due_at = case when progress.park_at is null then given.due_at end,
    attempts = given.attempts,
    -- Whoever only sent its outbox does not know what it waits for.
    trouble = coalesce(given.trouble, case when given.attempts > 0 then progress.trouble end),
    stuck_at = given.stuck_at,
    tries = given.tries::jsonb,
    updated_at = now()
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(due_at)s::timestamptz[],
    %(attempts)s::integer[], %(trouble)s::text[], %(stuck_at)s::bigint[], %(tries)s::text[]
) as given (topic, partition, due_at, attempts, trouble, stuck_at, tries)
where progress.pipeline = %(pipeline)s
  and progress.topic = given.topic
  and progress.partition = given.partition
  and progress.lease = %(lease)s::bigint[]
  and progress.owner = %(owner)s

-- name: pass_holes
-- Nothing is left before these offsets: what a query left out, or the log has no more. Only while
-- nobody holds the partition, and only from where it was seen.
update sideline.progress
set next_offset = given.until,
    updated_at = now()
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(seen)s::bigint[], %(until)s::bigint[]
) as given (topic, partition, seen, until)
where progress.pipeline = %(pipeline)s
  and progress.topic = given.topic
  and progress.partition = given.partition
  and progress.next_offset = given.seen
  and progress.next_offset < given.until
  and progress.released
  and progress.lease[1] <= %(epoch)s

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
-- Whether a worker's lease should end at the next slice boundary, the partitions that it should
-- let go of, whether somebody wants events back, and whether it should let go of all of them.
select stop_requested or epoch <> %(epoch)s,
       (
           select jsonb_agg(jsonb_build_array(progress.topic, progress.partition))
           from sideline.progress
           where progress.pipeline = pipelines.name
             and progress.paused
       ),
       exists (
           select
           from sideline.operations
           where operations.pipeline = pipelines.name
             and operations.state = 'running'
       ),
       paused
from sideline.pipelines
where name = %(pipeline)s

-- name: bury_workers
-- Rows of workers that are long gone.
delete from sideline.workers
where pipeline = %(pipeline)s
  and beat_at < clock_timestamp() - interval '1 hour'

-- Applying a range again: runs, and what they leave out.

-- name: registry
-- What a pipeline's ledger knows of a run of offsets that is not to be applied (again). What was
-- imported counts until the pipeline has met the event itself.
select "offset", state
from sideline.events
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and "offset" between %(first)s and %(last)s
  and (
      incarnation = %(incarnation)s
      or incarnation = -1
     and not exists (
         select
         from sideline.known_events as own
         where own.pipeline = events.pipeline
           and own.topic = events.topic
           and own.partition = events.partition
           and own."offset" = events."offset"
           and own.incarnation = %(incarnation)s
     )
  )
  and state in ('pending', 'parked', 'retrying', 'dead', 'discarded')

-- name: parked_heads
-- Of keys that are aside: where their first event stands that waits in a partition.
select keys.digest, head."offset"
from unnest((select %(digests)s::uuid[])) as given (digest)
join sideline.keys
  on keys.pipeline = %(pipeline)s
 and keys.topic = %(topic)s
 and keys.digest = given.digest
cross join lateral (
    select events."offset"
    from sideline.events
    where events.queue = keys.queue
      and events.topic = %(topic)s
      and events.partition = %(partition)s
      and events.incarnation = %(incarnation)s
    order by events.place
    limit 1
) as head

-- name: registry_counts
-- How much of some ranges is left out, by state.
select events.state, count(*)
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(starts)s::bigint[], %(ends)s::bigint[]
) as ranges (topic, partition, first, beyond)
join sideline.progress
  on progress.pipeline = %(pipeline)s
 and progress.topic = ranges.topic
 and progress.partition = ranges.partition
join sideline.events
  on events.pipeline = progress.pipeline
 and events.topic = ranges.topic
 and events.partition = ranges.partition
 and events."offset" >= ranges.first
 and events."offset" < ranges.beyond
 and (
     events.incarnation = progress.incarnation
     or events.incarnation = -1
    and not exists (
        select
        from sideline.known_events as own
        where own.pipeline = events.pipeline
          and own.topic = events.topic
          and own.partition = events.partition
          and own."offset" = events."offset"
          and own.incarnation = progress.incarnation
    )
 )
where events.state in ('parked', 'retrying', 'dead', 'discarded')
group by events.state

-- name: shared_topics
-- Topics whose keys may live in several partitions.
select distinct topic
from sideline.progress
where pipeline = %(pipeline)s
  and shared

-- name: run_under_way
-- The run of a pipeline that is not over.
select id, name, pipeline, state, alone, bounds, include_damaged, repeat_effects, skip_failures,
       actor, reason, created_at, ended_at
from sideline.runs
where pipeline = %(pipeline)s
  and state = 'running'

-- name: runs
-- All runs, by their names, and where they end.
select name, pipeline, state, bounds
from sideline.runs

-- name: lock_pipeline
-- One who changes what a pipeline may do; whether a driver stands is another question.
select paused, epoch
from sideline.pipelines
where name = %(pipeline)s
for update

-- name: unlock_place
-- Free the place of a pipeline's driver.
select pg_advisory_unlock(%(space)s, hashtext(%(pipeline)s))

-- name: lock_place_for_now
-- Hold the place of a pipeline's driver until this transaction ends.
select pg_try_advisory_xact_lock(%(space)s, hashtext(%(pipeline)s))

-- name: lock_partitions
-- No worker takes or moves these until this transaction ends.
select released, paused, outbox_last - outbox_sent
from sideline.progress
where pipeline = %(pipeline)s
order by topic, partition
for update

-- name: add_run
-- A run that applies a range again.
insert into sideline.runs (
    pipeline, alone, bounds, include_damaged, repeat_effects, skip_failures, actor, reason
)
values (
    %(pipeline)s, %(alone)s, %(bounds)s, %(include_damaged)s, %(repeat_effects)s,
    %(skip_failures)s, %(actor)s, %(reason)s
)
returning id, name

-- name: add_run_pipeline
-- What stands for a run wherever a pipeline stands.
insert into sideline.pipelines (name, handler_version, topics, sink, delivery)
values (%(run)s, %(version)s, %(topics)s, %(sink)s, %(delivery)s)

-- name: add_run_partitions
-- Where a run begins, with the topic as the pipeline itself knows it.
insert into sideline.progress (pipeline, topic, partition, topic_id, next_offset, incarnation)
select %(run)s, ranges.topic, ranges.partition, progress.topic_id, ranges.first,
       progress.incarnation
from unnest(%(topics)s::text[], %(partitions)s::integer[], %(starts)s::bigint[])
    as ranges (topic, partition, first)
join sideline.progress
  on progress.pipeline = %(pipeline)s
 and progress.topic = ranges.topic
 and progress.partition = ranges.partition

-- name: hold_for_run
-- Nobody takes a pipeline's partitions until the run is over.
update sideline.progress
set held_for = %(id)s
where pipeline = %(pipeline)s

-- name: let_go_of_run
-- The run is over: the pipeline goes on.
update sideline.progress
set held_for = null
where held_for = %(id)s

-- name: fence_pipeline
-- Whatever was handed out before is worth nothing from here on.
update sideline.pipelines
set epoch = epoch + 1
where name = %(pipeline)s
returning epoch

-- name: change_run
-- What is asked for when a run goes on.
update sideline.runs
set skip_failures = skip_failures or %(skip_failures)s
where id = %(id)s

-- name: end_run
-- A run is over, in one way or the other; only once.
update sideline.runs
set state = %(state)s,
    ended_at = now()
where id = %(id)s
  and state = 'running'
returning name

-- name: clear_alerts_of
-- What was open of it is over with it.
update sideline.alerts
set cleared_at = now(),
    updated_at = now()
where pipeline = %(pipeline)s
  and cleared_at is null

-- Cleaning: what is over and old, so many rows at a time. Locked rows are left for the next bite.

-- name: clean_events
-- Events that are done with.
delete from sideline.events
where ctid = any(array(
    select ctid
    from sideline.events
    where pipeline = %(pipeline)s
      and state in ('resolved', 'skipped')
      and updated_at < now() - %(age)s::interval
      -- Without its row nobody could take a copy out of the stash or dead-letter topic.
      and (
          purged_at is not null
          or held_in <> 'stash' and not exists (
              select
              from sideline.pipelines
              cross join lateral jsonb_each_text(pipelines.dead_letters) as letters
              where pipelines.name = events.pipeline
                and letters.value = events.copy_topic
          )
      )
    order by updated_at
    limit %(limit)s
    for update skip locked
))

-- name: clean_resolved
-- Events that came back long ago.
delete from sideline.resolved
where ctid = any(array(
    select ctid
    from sideline.resolved
    where pipeline = %(pipeline)s
      and updated_at < now() - %(age)s::interval
    limit %(limit)s
    for update skip locked
))

-- name: clean_discarded
-- Of events that were given up only the bytes go: their offsets stay known.
update sideline.events
set value = null,
    header_names = '{}',
    header_values = '{}',
    traceback = null,
    -- There is nothing left that could be put back.
    former = null,
    former_queue = null,
    erased_at = now()
where ctid = any(array(
    select ctid
    from sideline.events
    where pipeline = %(pipeline)s
      and state = 'discarded'
      and erased_at is null
      and updated_at < now() - %(age)s::interval
    order by updated_at
    limit %(limit)s
    for update skip locked
))

-- name: clean_operation_items
-- What operations applied to that have been over for long.
delete from sideline.operation_items
where ctid = any(array(
    select items.ctid
    from sideline.operations
    join sideline.operation_items as items on items.operation = operations.id
    where operations.pipeline = %(pipeline)s
      and operations.state in ('done', 'cancelled')
      and operations.ended_at < now() - %(age)s::interval
    limit %(limit)s
    for update of items skip locked
))

-- name: clean_operations
-- The operations themselves, once their items are gone.
delete from sideline.operations
where id = any(array(
    select id
    from sideline.operations
    where pipeline = %(pipeline)s
      and state in ('done', 'cancelled')
      and ended_at < now() - %(age)s::interval
      and not exists (
          select
          from sideline.operation_items
          where operation_items.operation = operations.id
      )
    order by id
    limit %(limit)s
    for update skip locked
))

-- name: clean_alerts
-- Alerts that were cleared.
delete from sideline.alerts
where id = any(array(
    select id
    from sideline.alerts
    where pipeline = %(pipeline)s
      and cleared_at < now() - %(age)s::interval
    order by cleared_at
    limit %(limit)s
    for update skip locked
))

-- name: clean_audit
-- Who did what: the oldest records of a pipeline, or (null) those that belong to none.
delete from sideline.audit
where id = any(array(
    select oldest.id
    from (
        select id, at
        from sideline.audit
        where pipeline is not distinct from %(pipeline)s::text
        order by id
        limit %(limit)s
    ) as oldest
    where oldest.at < now() - %(age)s::interval
))

-- name: clean_message_ids
-- Ids that are older than their pipeline keeps them; the pages of younger ones are not looked at.
delete from sideline.message_ids
where ctid = any(array(
    select message_ids.ctid
    from sideline.message_ids
    where message_ids.pipeline = (select number from sideline.pipelines where name = %(pipeline)s)
      and message_ids.stored_at
          < now() - (select ids_kept from sideline.pipelines where name = %(pipeline)s)
    limit %(limit)s
    for update skip locked
))

-- name: old_run
-- A run that has been over for long.
select name
from sideline.runs
where pipeline = %(pipeline)s
  and state in ('done', 'cancelled')
  and ended_at < now() - %(age)s::interval
order by id
limit 1

-- name: count_old
-- How much there is of each kind, in the order in which it is cleaned.
select (
           select count(*)
           from sideline.events
           where pipeline = %(pipeline)s
             and state in ('resolved', 'skipped')
             and updated_at < now() - %(events)s::interval
       ),
       (
           select count(*)
           from sideline.resolved
           where pipeline = %(pipeline)s
             and updated_at < now() - %(events)s::interval
       ),
       (
           select count(*)
           from sideline.events
           where pipeline = %(pipeline)s
             and state = 'discarded'
             and erased_at is null
             and updated_at < now() - %(events)s::interval
       ),
       (
           select count(*)
           from sideline.operations
           join sideline.operation_items on operation_items.operation = operations.id
           where operations.pipeline = %(pipeline)s
             and operations.state in ('done', 'cancelled')
             and operations.ended_at < now() - %(operations)s::interval
       ),
       (
           select count(*)
           from sideline.operations
           where pipeline = %(pipeline)s
             and state in ('done', 'cancelled')
             and ended_at < now() - %(operations)s::interval
       ),
       (
           select count(*)
           from sideline.alerts
           where pipeline = %(pipeline)s
             and cleared_at < now() - %(alerts)s::interval
       ),
       (
           select count(*)
           from sideline.message_ids
           join sideline.pipelines on pipelines.number = message_ids.pipeline
           where pipelines.name = %(pipeline)s
             and message_ids.stored_at < now() - pipelines.ids_kept
       ),
       (
           select count(*)
           from sideline.audit
           where pipeline is not distinct from %(pipeline)s::text
             and at < now() - %(audit)s::interval
       ),
       (
           select count(*)
           from sideline.runs
           where pipeline = %(pipeline)s
             and state in ('done', 'cancelled')
             and ended_at < now() - %(operations)s::interval
       )

-- Erasing: the bytes of a key, or everything of a pipeline.

-- name: events_of_key
-- What there is of a record's key, by state, and how much of it has no bytes any more.
select state, count(*), count(erased_at)
from sideline.events
where pipeline = %(pipeline)s
  and key = %(key)s
  and (%(topic)s::text is null or topic = %(topic)s)
group by state

-- name: spots_of_key
-- Where the events of a record's key came from.
select distinct topic, partition
from sideline.events
where pipeline = %(pipeline)s
  and key = %(key)s
  and (%(topic)s::text is null or topic = %(topic)s)

-- name: lock_spots
-- The rows of some partitions, first and in one order, so that nobody waits in a circle (K16).
select from sideline.progress
where pipeline = %(pipeline)s
  and (topic, partition) in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))
order by topic, partition
for no key update

-- name: lock_events_of_key
-- The same, kept as they are until this transaction ends.
select state
from sideline.events
where pipeline = %(pipeline)s
  and key = %(key)s
  and (%(topic)s::text is null or topic = %(topic)s)
order by place
for update

-- name: erase_events
-- Key, value, headers and the words about them are gone; where the events stood stays known.
with gone as (
    select events.pipeline, events.topic, events.partition, events."offset", events.incarnation,
           events.state, copies.topic as copy_topic
    from sideline.events
    join sideline.pipelines on pipelines.name = events.pipeline
    -- Where a copy still is that is keyed by the event's id.
    left join lateral (
        select case
                   when events.held_in = 'stash' then pipelines.stashes ->> events.topic
                   when events.copy_topic in (
                       select letters.value
                       from jsonb_each_text(pipelines.dead_letters) as letters
                   ) then events.copy_topic
               end as topic
        where events.purged_at is null
          and events.incarnation >= 0
          -- Nobody could write to the outbox of a partition that is gone.
          and exists (
              select
              from sideline.progress
              where progress.pipeline = events.pipeline
                and progress.topic = events.topic
                and progress.partition = events.partition
          )
    ) as copies on true
    where events.pipeline = %(pipeline)s
      and events.key = %(key)s
      and (%(topic)s::text is null or events.topic = %(topic)s)
)
update sideline.events
set key = null,
    value = null,
    header_names = '{}',
    header_values = '{}',
    message = case when events.message is not null then '' end,
    traceback = null,
    state = case when events.state = 'dead' then 'discarded' else events.state end,
    former = null,
    former_queue = null,
    erased_at = coalesce(events.erased_at, now()),
    -- Nobody looks for them elsewhere either.
    held_in = 'ledger',
    purged_at = case when gone.copy_topic is null then events.purged_at else now() end
from gone
where events.pipeline = gone.pipeline
  and events.topic = gone.topic
  and events.partition = gone.partition
  and events."offset" = gone."offset"
  and events.incarnation = gone.incarnation
-- What was imported is in no counter.
returning events.topic, events.partition, events."offset", events.incarnation,
          gone.state = 'dead' and gone.incarnation >= 0, gone.copy_topic

-- name: causes_of_key
-- How many causes still quote an event of a record's key, which may have come back long ago.
select count(*)
from sideline.causes
where pipeline = %(pipeline)s
  and last_key = %(key)s
  and (%(topic)s::text is null or topic = %(topic)s)

-- name: erase_causes
-- What was said of the last event of a cause, where that one is erased, or was of that key.
update sideline.causes
set message = '',
    traceback = '',
    last_key = null
where pipeline = %(pipeline)s
  and (
      last_key = %(key)s and (%(topic)s::text is null or topic = %(topic)s)
      or (topic, partition, last_offset) in (
          select *
          from unnest(%(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[])
      )
  )

-- name: erase_outbox
-- Copies of erased events that have not left: without a value they say that there is nothing more.
update sideline.outbox
set value = null,
    header_names = '{}',
    header_values = '{}'
from unnest(%(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[])
    as gone (topic, partition, "offset")
where outbox.pipeline = %(pipeline)s
  and outbox.of_topic = gone.topic
  and outbox.of_partition = gone.partition
  and outbox.of_offset = gone."offset"

-- name: erase_operations
-- What people asked for by that key: that they did is kept, the key is not.
update sideline.operations
set selection = jsonb_set(selection, '{keys}', '"erased"')
where pipeline = %(pipeline)s
  and selection @> jsonb_build_object('keys', jsonb_build_array(%(shown)s::jsonb))

-- name: erase_audit
-- The same in the audit, where the role may.
update sideline.audit
set subject = jsonb_set(subject, '{selection,keys}', '"erased"')
where pipeline = %(pipeline)s
  and subject @> jsonb_build_object(
      'selection', jsonb_build_object('keys', jsonb_build_array(%(shown)s::jsonb))
  )

-- name: give_up_dead
-- Dead events without bytes can be released no more.
update sideline.progress
set dead = progress.dead - given.events,
    discarded = progress.discarded + given.events
from unnest(%(topics)s::text[], %(partitions)s::integer[], %(counts)s::bigint[])
    as given (topic, partition, events)
where progress.pipeline = %(pipeline)s
  and progress.topic = given.topic
  and progress.partition = given.partition

-- name: runs_of
-- The runs that applied ranges of a pipeline again.
select name
from sideline.runs
where pipeline = %(pipeline)s
order by id

-- name: count_waiting
-- Events of some pipelines that are still to be applied, and records that are still to be sent.
select coalesce(
    sum(parked + retrying + outbox_last - outbox_sent + (pending is not null)::integer), 0
)::bigint
from sideline.progress
where pipeline = any(%(pipelines)s::text[])

-- name: count_belongings
-- What there is of some pipelines, by table.
select 'events', count(*) from sideline.events where pipeline = any(%(pipelines)s::text[])
union all
select 'resolved', count(*) from sideline.resolved where pipeline = any(%(pipelines)s::text[])
union all
select 'keys', count(*) from sideline.keys where pipeline = any(%(pipelines)s::text[])
union all
select 'queues', count(*) from sideline.queues where pipeline = any(%(pipelines)s::text[])
union all
select 'causes', count(*) from sideline.causes where pipeline = any(%(pipelines)s::text[])
union all
select 'operations', count(*) from sideline.operations where pipeline = any(%(pipelines)s::text[])
union all
select 'alerts', count(*) from sideline.alerts where pipeline = any(%(pipelines)s::text[])
union all
select 'topics', count(*) from sideline.topics where pipeline = any(%(pipelines)s::text[])
union all
select 'outbox', count(*) from sideline.outbox where pipeline = any(%(pipelines)s::text[])
union all
select 'message ids', count(*)
from sideline.message_ids
join sideline.pipelines on pipelines.number = message_ids.pipeline
where pipelines.name = any(%(pipelines)s::text[])
union all
select 'progress', count(*) from sideline.progress where pipeline = any(%(pipelines)s::text[])
union all
select 'runs', count(*) from sideline.runs where pipeline = any(%(pipelines)s::text[])

-- name: remove_pipelines
-- Everything of some pipelines but the audit, in one statement: what refers to what does not matter.
with events as (
    delete from sideline.events
    where pipeline = any(%(pipelines)s::text[])
),
resolved as (
    delete from sideline.resolved
    where pipeline = any(%(pipelines)s::text[])
),
keys as (
    delete from sideline.keys
    where pipeline = any(%(pipelines)s::text[])
),
queues as (
    delete from sideline.queues
    where pipeline = any(%(pipelines)s::text[])
),
causes as (
    delete from sideline.causes
    where pipeline = any(%(pipelines)s::text[])
),
operations as (
    delete from sideline.operations
    where pipeline = any(%(pipelines)s::text[])
),
alerts as (
    delete from sideline.alerts
    where pipeline = any(%(pipelines)s::text[])
),
topics as (
    delete from sideline.topics
    where pipeline = any(%(pipelines)s::text[])
),
outbox as (
    delete from sideline.outbox
    where pipeline = any(%(pipelines)s::text[])
),
message_ids as (
    delete from sideline.message_ids
    using sideline.pipelines
    where pipelines.number = message_ids.pipeline
      and pipelines.name = any(%(pipelines)s::text[])
),
retry_topics as (
    delete from sideline.retry_topics
    where pipeline = any(%(pipelines)s::text[])
),
workers as (
    delete from sideline.workers
    where pipeline = any(%(pipelines)s::text[])
),
progress as (
    delete from sideline.progress
    where pipeline = any(%(pipelines)s::text[])
),
runs as (
    delete from sideline.runs
    where pipeline = any(%(pipelines)s::text[])
       or name = any(%(pipelines)s::text[])
)
delete from sideline.pipelines
where name = any(%(pipelines)s::text[])

-- Parking: what failed and what follows it.

-- name: marks_at_home
-- The marks of the keys aside whose home is one partition, in one piece.
select coalesce(string_agg(int4send(mark), ''), '')
from sideline.queues
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and home = %(partition)s

-- name: keys_of_topic
-- The keys aside of a topic since a version of it, and its version now, in one snapshot.
select topics.version, keys.key, keys.derived
from sideline.topics
left join sideline.keys
  on keys.pipeline = topics.pipeline
 and keys.topic = topics.topic
 and keys.version > %(since)s
where topics.pipeline = %(pipeline)s
  and topics.topic = %(topic)s

-- name: keys_among
-- Which of some keys are aside at home in one partition. The array of this and the next ones stands
-- in a subselect, so that the planner does not count it: it would read a million keys to find a
-- thousand.
select keys.key, keys.derived
from unnest((select %(digests)s::uuid[])) as given (digest)
join sideline.keys
  on keys.pipeline = %(pipeline)s
 and keys.topic = %(topic)s
 and keys.digest = given.digest
where %(partition)s = (
    -- A probe for each: a join could read all queues.
    select queues.home
    from sideline.queues
    where queues.id = keys.queue
)

-- name: queues_among
-- Where some keys wait, by their place in the array.
select given.number - 1, keys.queue
from unnest((select %(digests)s::uuid[])) with ordinality as given (digest, number)
join sideline.keys
  on keys.pipeline = %(pipeline)s
 and keys.topic = %(topic)s
 and keys.digest = given.digest

-- name: share_topic
-- A topic's keys may live in several partitions from here on.
-- Its version is beyond those of the keys that are aside already: nobody reads them twice.
insert into sideline.topics (pipeline, topic, version)
select %(pipeline)s, %(topic)s, coalesce(max(aside_version), 0) + 1
from sideline.progress
where pipeline = %(pipeline)s
  and topic = %(topic)s
on conflict (pipeline, topic) do nothing

-- name: share_partitions
-- The same for the partitions that are read already: their next slice sees it.
update sideline.progress
set shared = true
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and not shared

-- name: hold_topic
-- No key of the topic steps aside or rejoins elsewhere until this transaction ends.
select version
from sideline.topics
where pipeline = %(pipeline)s
  and topic = %(topic)s
for share

-- name: claim_topic
-- The same, for a slice that is about to set keys aside itself.
select version
from sideline.topics
where pipeline = %(pipeline)s
  and topic = %(topic)s
for no key update

-- name: move_topic
-- A key of the topic steps aside: slices elsewhere that saw the version before ask again.
update sideline.topics
set version = version + 1
where pipeline = %(pipeline)s
  and topic = %(topic)s
returning version

-- name: step_aside
-- Keys step aside, each with a queue of its own.
with given as (
    select *
    from unnest(
        %(digests)s::uuid[], %(marks)s::integer[], %(keys)s::bytea[], %(derived)s::boolean[]
    ) as given (digest, mark, key, derived)
),
founded as (
    insert into sideline.queues (pipeline, topic, home, digest, mark)
    select %(pipeline)s, %(topic)s, %(partition)s, digest, mark
    from given
    returning id, digest
)
insert into sideline.keys (pipeline, topic, digest, key, derived, queue, version)
select %(pipeline)s, %(topic)s, given.digest, given.key, given.derived, founded.id, %(version)s
from given
join founded on founded.digest = given.digest
on conflict (pipeline, topic, digest) do nothing

-- name: join_queue
-- Keys step aside into queues that there are already.
insert into sideline.keys (pipeline, topic, digest, key, derived, queue, version)
select %(pipeline)s, %(topic)s, given.digest, given.key, true, given.queue, %(version)s
from unnest(%(digests)s::uuid[], %(keys)s::bytea[], %(queues)s::bigint[])
    as given (digest, key, queue)

-- name: meet
-- Two queues turn out to be one: whoever waits in the second waits in the first from here on.
with moved_keys as (
    update sideline.keys
    set queue = %(into)s
    where queue = %(queue)s
),
moved_events as (
    update sideline.events
    set queue = %(into)s
    where queue = %(queue)s
    returning 1
),
-- Those that were given up go back there, if a person wants them back.
moved_leavers as (
    update sideline.events
    set former_queue = %(into)s
    where former_queue = %(queue)s
)
update sideline.queues
set events = queues.events + (select count(*) from moved_events),
    passed = greatest(queues.passed, other.passed)
from sideline.queues as other
where queues.id = %(into)s
  and other.id = %(queue)s

-- name: forget_queue
-- A queue in which nobody waits any more.
delete from sideline.queues
where id = %(queue)s
returning home

-- name: one_aside_less
-- A queue at home in a partition has joined another.
update sideline.progress
set aside = aside - 1,
    aside_version = aside_version + 1
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s

-- name: grow
-- Queues get longer; nobody ends one meanwhile. In the order of the array, so that nobody waits
-- in a circle. With a home, only those that are at home there.
update sideline.queues
set events = queues.events + given.events
from unnest((select %(queues)s::bigint[]), (select %(events)s::bigint[]))
    as given (queue, events)
where queues.id = given.queue
  and queues.home = coalesce(%(home)s, queues.home)

-- name: park
-- Events of one slice, in log order. Places grow with the log.
insert into sideline.events (
    pipeline, topic, partition, incarnation, handler_version, state, "offset", queue, alone, why,
    key, value, header_names, header_values, timestamp_ms,
    stage, error, message, traceback, fingerprint, attempts, held_in,
    becomes, pending_topic, pending_partition, fresh
)
select %(pipeline)s, %(topic)s, %(partition)s, %(incarnation)s, %(version)s,
       case when %(fresh)s then 'pending' else 'parked' end,
       given."offset", given.queue, given."offset" = any(%(alone)s::bigint[]),
       case when given.fingerprint is null then 'follows' else 'failed' end,
       given.key, given.value, given.header_names::text[], given.header_values::bytea[],
       given.timestamp_ms, given.stage, given.error, given.message, given.traceback,
       given.fingerprint, given.attempts, given.held_in,
       case when %(fresh)s then 'parked' end, %(pending_topic)s, %(pending_partition)s, %(fresh)s
from unnest(
    %(offsets)s::bigint[], %(queues)s::bigint[], %(keys)s::bytea[], %(values)s::bytea[],
    %(header_names)s::text[], %(header_values)s::text[], %(timestamps)s::bigint[],
    %(stages)s::text[], %(errors)s::text[], %(messages)s::text[], %(tracebacks)s::text[],
    %(fingerprints)s::text[], %(attempts)s::integer[], %(held)s::text[]
) as given (
    "offset", queue, key, value, header_names, header_values, timestamp_ms,
    stage, error, message, traceback, fingerprint, attempts, held_in
)

-- name: count_causes
-- Why events of a slice failed, how many of them, and the last one as an example.
insert into sideline.causes (
    pipeline, topic, partition, fingerprint, error, stage, place, message, traceback,
    last_offset, last_key, parked, skipped, retried, dead
)
select %(pipeline)s, %(topic)s, %(partition)s, given.*
from unnest(
    %(fingerprints)s::text[], %(errors)s::text[], %(stages)s::text[], %(places)s::text[],
    %(messages)s::text[], %(tracebacks)s::text[], %(offsets)s::bigint[], %(keys)s::bytea[],
    %(parked)s::bigint[], %(skipped)s::bigint[], %(retried)s::bigint[], %(dead)s::bigint[]
) as given
order by 4
on conflict (pipeline, fingerprint, topic, partition) do update
set place = excluded.place,
    message = excluded.message,
    traceback = excluded.traceback,
    last_offset = excluded.last_offset,
    last_key = excluded.last_key,
    parked = causes.parked + excluded.parked,
    skipped = causes.skipped + excluded.skipped,
    retried = causes.retried + excluded.retried,
    dead = causes.dead + excluded.dead,
    last_at = now()

-- Coming back: operations, and what the owner of a queue's home does for them.

-- name: operations_under_way
-- Operations that run, and the partitions where something of them waits; a probe for each pair.
select operations.id, operations.note, progress.topic, progress.partition
from sideline.operations
left join sideline.progress
  on progress.pipeline = operations.pipeline
 and exists (
     select
     from sideline.operation_items as items
     where items.operation = operations.id
       and items.topic = progress.topic
       and items.home = progress.partition
       and items.state = 'waiting'
       and items.number > coalesce(
           (
               select counts.seen
               from sideline.operation_counts as counts
               where counts.operation = operations.id
                 and counts.topic = progress.topic
                 and counts.partition = progress.partition
           ),
           -1
       )
 )
where operations.pipeline = %(pipeline)s
  and operations.state = 'running'

-- name: finish_operations
-- Nothing of them waits any more.
update sideline.operations
set state = 'done',
    note = case when note like 'waits: %%' then null else note end,
    ended_at = now(),
    updated_at = now()
where pipeline = %(pipeline)s
  and state = 'running'
  -- Home by home, each from where it stands: there may be a million items.
  and not exists (
      select
      from sideline.progress
      left join sideline.operation_counts as counts
        on counts.operation = operations.id
       and counts.topic = progress.topic
       and counts.partition = progress.partition
      cross join lateral (
          select
          from sideline.operation_items as items
          where items.operation = operations.id
            and items.topic = progress.topic
            and items.home = progress.partition
            and items.state = 'waiting'
            and items.number > coalesce(counts.seen, -1)
          limit 1
      ) as waiting
      where progress.pipeline = operations.pipeline
  )

-- name: items_waiting
-- The next items of the operations that run, at home in one partition; how much waits in their
-- queues, and how many events of the operation were tried here so far.
select items.operation, items.number, operations.kind, operations.rate, items.queue,
       items.partition, items."offset", items.incarnation,
       -- A probe for each: a join could read all queues.
       (
           select queues.events
           from sideline.queues
           where queues.id = items.queue
             and queues.pipeline = %(pipeline)s
             and queues.topic = %(topic)s
             and queues.home = %(partition)s
       ),
       coalesce(counts.applied + counts.failed, 0)
from sideline.operations
left join sideline.operation_counts as counts
  on counts.operation = operations.id
 and counts.topic = %(topic)s
 and counts.partition = %(partition)s
cross join lateral (
    select *
    from sideline.operation_items
    where operation_items.operation = operations.id
      and operation_items.topic = %(topic)s
      and operation_items.home = %(partition)s
      and operation_items.state = 'waiting'
      and operation_items.number > greatest(counts.seen, %(after)s::bigint)
    order by operation_items.topic, operation_items.home, operation_items.number
    limit %(limit)s
) as items
where operations.pipeline = %(pipeline)s
  and operations.state = 'running'
  and operations.id <> all(%(excluded)s::bigint[])
order by items.operation, items.number
limit %(limit)s

-- name: operation_stands
-- How many events of a release were tried in this partition so far, if it goes on there right
-- behind an item, with nothing older before it.
select counts.applied + counts.failed
from sideline.operations
join sideline.operation_counts as counts on counts.operation = operations.id
where operations.id = %(operation)s
  and operations.state = 'running'
  and operations.rate is null
  and counts.topic = %(topic)s
  and counts.partition = %(partition)s
  and counts.seen = %(after)s
  and not exists (
      select
      from sideline.operations as older
      where older.pipeline = %(pipeline)s
        and older.state = 'running'
        and older.id < %(operation)s
        and older.id <> all(%(excluded)s::bigint[])
  )

-- name: homes_of_operation
-- How many partitions share the rate of an operation.
select count(*)
from sideline.progress
where pipeline = %(pipeline)s
  and exists (
      select
      from sideline.operation_items as items
      where items.operation = %(operation)s
        and items.topic = progress.topic
        and items.home = progress.partition
        and items.state = 'waiting'
        and items.number > coalesce(
            (
                select counts.seen
                from sideline.operation_counts as counts
                where counts.operation = %(operation)s
                  and counts.topic = progress.topic
                  and counts.partition = progress.partition
            ),
            -1
        )
  )

-- name: waiting_events
-- What waits in some queues, in each as far as its limit, in the order of replay; no more bytes
-- than a slice may have, but one event at least.
select number, place, partition, "offset", queue, key, value, timestamp_ms,
       -- Of most of them there is nothing to say here: nothing is decoded for them.
       nullif(state, 'parked'), nullif(incarnation, 0), nullif(generation, 0), fingerprint,
       nullif(header_names, '{}'), nullif(header_values, '{}'), nullif(held_in, 'ledger')
from (
    select given.number, waiting.*,
           sum(coalesce(octet_length(waiting.value), 0)) over (
               order by given.number, waiting.place
               rows between unbounded preceding and 1 preceding
           ) as before
    from unnest((select %(queues)s::bigint[]), (select %(limits)s::bigint[]))
        with ordinality as given (queue, most, number)
    cross join lateral (
        select place, partition, "offset", incarnation, state, fingerprint, generation, queue,
               key, value, timestamp_ms, header_names, header_values, held_in
        from sideline.events
        where events.queue = given.queue
          -- What a slice wrote that is not applied yet is not overtaken (K21).
          and events.place < coalesce(
              (
                  select min(unsure.place)
                  from sideline.events as unsure
                  where unsure.queue = given.queue
                    and unsure.state = 'pending'
              ),
              9223372036854775807
          )
        order by events.place
        limit given.most
    ) as waiting
) as bounded
where coalesce(before, 0) < %(bytes)s
order by number, place

-- name: single_events
-- Events that are named one by one; bounded in the same way.
select number, place, partition, "offset", queue, key, value, timestamp_ms,
       -- Of most of them there is nothing to say here: nothing is decoded for them.
       nullif(state, 'parked'), nullif(incarnation, 0), nullif(generation, 0), fingerprint,
       nullif(header_names, '{}'), nullif(header_values, '{}'), nullif(held_in, 'ledger')
from (
    select given.number, events.*,
           sum(coalesce(octet_length(events.value), 0)) over (
               order by given.number rows between unbounded preceding and 1 preceding
           ) as before
    from unnest(
        (select %(partitions)s::integer[]), (select %(offsets)s::bigint[]),
        (select %(incarnations)s::integer[])
    )
        with ordinality as given (partition, "offset", incarnation, number)
    join sideline.events
      on events.pipeline = %(pipeline)s
     and events.topic = %(topic)s
     and events.partition = given.partition
     and events."offset" = given."offset"
     and events.incarnation = given.incarnation
     and events.erased_at is null
) as bounded
where coalesce(before, 0) < %(bytes)s
order by number

-- name: discardable_events
-- The same without their bytes: nobody handles them.
select given.number, events.place, events.partition, events."offset", events.incarnation,
       events.state, events.why, events.fingerprint, events.generation, events.queue,
       events.former, events.former_queue, events.erased_at is not null
from unnest(
    (select %(partitions)s::integer[]), (select %(offsets)s::bigint[]),
    (select %(incarnations)s::integer[])
)
    with ordinality as given (partition, "offset", incarnation, number)
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = %(topic)s
 and events.partition = given.partition
 and events."offset" = given."offset"
 and events.incarnation = given.incarnation
order by given.number

-- name: fence_replay
-- The first statement of a replay's transaction: the rows of all partitions whose counters it
-- changes, in one order, so that two owners do not wait for each other in a circle. Progress
-- itself stays where it is.
select partition, lease = %(lease)s::bigint[] and owner = %(owner)s, shared, aside_version
from sideline.progress
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = any(%(partitions)s::integer[])
order by partition
for no key update

-- name: lock_queues
-- Nobody parks behind them, joins or ends them until this transaction is over.
select id, events, passed
from sideline.queues
where id in (select unnest((select %(queues)s::bigint[])))
order by id
for no key update

-- name: queues_met
-- Queues that have joined others since events were read in them, by one event of each.
select given.queue, events.queue, queues.home
from unnest(
    (select %(partitions)s::integer[]), (select %(offsets)s::bigint[]),
    (select %(incarnations)s::integer[]), (select %(queues)s::bigint[])
) as given (partition, "offset", incarnation, queue)
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = %(topic)s
 and events.partition = given.partition
 and events."offset" = given."offset"
 and events.incarnation = given.incarnation
 and events.queue <> given.queue
join sideline.queues on queues.id = events.queue

-- name: resolve_queued
-- Events that were replayed leave their queues, from the first one to a place. How many, and what
-- tells whether they are those that were read: only its owner takes away from a queue, places are
-- never used twice, and generations only grow.
with given as (
    select *
    from unnest((select %(queues)s::bigint[]), (select %(lasts)s::bigint[]))
        as given (queue, last)
),
gone as (
    delete from sideline.events
    using given
    where events.queue = given.queue
      and events.place <= given.last
      and events.state = 'parked'
      -- Without its row nobody could take a copy out of its topic, or know that it was imported.
      and events.held_in <> 'stash'
      and events.copy_topic is null
      and events.imported_from is null
    returning events.pipeline, events.topic, events.partition, events."offset",
              events.incarnation, events.place, events.queue, events.why, events.stage,
              events.error, events.fingerprint, events.handler_version, events.timestamp_ms,
              events.attempts, events.generation, events.parked_at
),
moved as (
    insert into sideline.resolved (
        pipeline, topic, partition, "offset", incarnation, place, queue, operation, why, stage,
        error, fingerprint, handler_version, timestamp_ms, attempts, generation, parked_at
    )
    select pipeline, topic, partition, "offset", incarnation, place, queue, %(operation)s, why,
           stage, error, fingerprint, handler_version, timestamp_ms, attempts + 1, generation,
           parked_at
    from gone
)
select count(*), coalesce(sum(place), 0)::bigint, coalesce(sum(generation), 0)::bigint
from gone

-- name: resolve_kept
-- The same for those whose rows stay where they are.
with given as (
    select *
    from unnest((select %(queues)s::bigint[]), (select %(lasts)s::bigint[]))
        as given (queue, last)
),
gone as (
    update sideline.events
    set state = 'resolved',
        former_queue = events.queue,
        queue = null,
        attempts = attempts + 1,
        updated_at = now()
    from given
    where events.queue = given.queue
      and events.place <= given.last
      and events.state = 'parked'
    returning events.place, events.generation
)
select count(*), coalesce(sum(place), 0)::bigint, coalesce(sum(generation), 0)::bigint
from gone

-- name: resolve
-- The same for events that stand alone: only as they were when they were read; the caller counts.
update sideline.events
set state = 'resolved',
    former_queue = coalesce(events.queue, events.former_queue),
    queue = null,
    attempts = attempts + 1,
    updated_at = now()
from unnest(
    (select %(partitions)s::integer[]), (select %(offsets)s::bigint[]),
    (select %(incarnations)s::integer[]),
    (select %(generations)s::integer[]), (select %(states)s::text[]), (select %(queues)s::bigint[])
) as given (partition, "offset", incarnation, generation, state, queue)
where events.pipeline = %(pipeline)s
  and events.topic = %(topic)s
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation
  and events.generation = given.generation
  and events.state = given.state
  and events.queue is not distinct from given.queue

-- name: fail_again
-- Events that failed in replay: back aside, in their old places, as the next generation.
update sideline.events
set why = 'failed',
    stage = given.stage,
    error = given.error,
    message = given.message,
    traceback = given.traceback,
    fingerprint = given.fingerprint,
    handler_version = %(version)s,
    generation = events.generation + 1,
    attempts = attempts + 1,
    deaths = 0,
    updated_at = now()
from unnest(
    (select %(partitions)s::integer[]), (select %(offsets)s::bigint[]),
    (select %(incarnations)s::integer[]),
    (select %(generations)s::integer[]), (select %(states)s::text[]), (select %(queues)s::bigint[]),
    (select %(stages)s::text[]),
    (select %(errors)s::text[]), (select %(messages)s::text[]), (select %(tracebacks)s::text[]),
    (select %(fingerprints)s::text[])
) as given (
    partition, "offset", incarnation, generation, state, queue, stage, error, message, traceback,
    fingerprint
)
where events.pipeline = %(pipeline)s
  and events.topic = %(topic)s
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation
  and events.generation = given.generation
  and events.state = given.state
  and events.queue is not distinct from given.queue

-- name: discard
-- A person gave up on them. What they were is remembered, should somebody want them back.
update sideline.events
set state = 'discarded',
    queue = null,
    former = events.state,
    former_queue = events.queue,
    updated_at = now()
from unnest(
    (select %(partitions)s::integer[]), (select %(offsets)s::bigint[]),
    (select %(incarnations)s::integer[]),
    (select %(generations)s::integer[]), (select %(states)s::text[]), (select %(queues)s::bigint[])
) as given (partition, "offset", incarnation, generation, state, queue)
where events.pipeline = %(pipeline)s
  and events.topic = %(topic)s
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation
  and events.generation = given.generation
  and events.state = given.state
  and events.queue is not distinct from given.queue

-- name: restore
-- They wait again, in their old places.
update sideline.events
set state = events.former,
    queue = events.former_queue,
    former = null,
    former_queue = null,
    updated_at = now()
from unnest(
    (select %(partitions)s::integer[]), (select %(offsets)s::bigint[]),
    (select %(incarnations)s::integer[]),
    (select %(queues)s::bigint[])
) as given (partition, "offset", incarnation, queue)
where events.pipeline = %(pipeline)s
  and events.topic = %(topic)s
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation
  and events.state = 'discarded'
  -- Somebody may have wanted its bytes gone since it was looked at.
  and events.erased_at is null
  and events.former_queue is not distinct from given.queue

-- name: uncount_causes
-- Events that are no longer parked because of what they failed for.
update sideline.causes
set parked = causes.parked - given.events
from unnest(
    (select %(partitions)s::integer[]), (select %(fingerprints)s::text[]),
    (select %(events)s::bigint[])
)
    as given (partition, fingerprint, events)
where causes.pipeline = %(pipeline)s
  and causes.topic = %(topic)s
  and causes.partition = given.partition
  and causes.fingerprint = given.fingerprint

-- name: shrink
-- Queues get shorter; what is left in them, with those that wait since a moment ago (K17).
update sideline.queues
set events = queues.events - given.events,
    passed = greatest(queues.passed, given.passed)
from unnest(
    (select %(queues)s::bigint[]), (select %(events)s::bigint[]), (select %(passed)s::bigint[])
)
    as given (queue, events, passed)
where queues.id = given.queue
returning queues.id, queues.events

-- name: end_queues
-- Queues of which everybody was replayed end, unless somebody waits in them since a moment ago (K17),
-- and their keys are no longer aside. The schema forbids it while an event waits in one (K14).
with given as (
    select *
    from unnest((select %(queues)s::bigint[]), (select %(events)s::bigint[]))
        as given (queue, events)
),
ended as (
    delete from sideline.queues
    using given
    where queues.id = given.queue
      and queues.events = given.events
    returning queues.id
),
rejoined as (
    delete from sideline.keys
    using ended
    where keys.queue = ended.id
    returning keys.queue, keys.key, keys.derived
)
select id, null::bytea, null::boolean
from ended
union all
select queue, key, derived
from rejoined

-- name: count_replay
-- What became of events that were consumed long ago, each counted where it was consumed.
update sideline.progress
set applied = progress.applied + given.applied,
    filtered = progress.filtered + given.filtered,
    parked = progress.parked + given.parked,
    dead = progress.dead + given.dead,
    discarded = progress.discarded + given.discarded,
    duplicate = progress.duplicate + given.duplicate,
    aside = progress.aside - given.rejoined,
    aside_version = progress.aside_version + (given.rejoined > 0)::integer,
    updated_at = now()
from unnest(
    (select %(partitions)s::integer[]), (select %(applied)s::bigint[]),
    (select %(filtered)s::bigint[]), (select %(parked)s::bigint[]),
    (select %(dead)s::bigint[]), (select %(discarded)s::bigint[]),
    (select %(duplicate)s::bigint[]), (select %(rejoined)s::bigint[])
) as given (partition, applied, filtered, parked, dead, discarded, duplicate, rejoined)
where progress.pipeline = %(pipeline)s
  and progress.topic = %(topic)s
  and progress.partition = given.partition
returning progress.partition, progress.ctid::text, progress.aside, progress.aside_version

-- name: keys_that_failed_again
-- Keys of the dead events that an operation could not bring back from here.
select distinct events.key
from sideline.operation_items as items
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = items.topic
 and events.partition = items.partition
 and events."offset" = items."offset"
 and events.incarnation = items.incarnation
where items.operation = %(operation)s
  and items.topic = %(topic)s
  and items.home = %(partition)s
  and items.state = 'failed'
  and events.state = 'dead'
  and events.key is not null

-- name: mark_items
-- What became of items of an operation.
update sideline.operation_items
set state = given.state
from unnest((select %(numbers)s::bigint[]), (select %(states)s::text[])) as given (number, state)
where operation_items.operation = %(operation)s
  and operation_items.number = given.number
  and operation_items.state = 'waiting'

-- name: items_of_queue
-- What is still to happen to a queue, and how far the home of another one is in the same operation.
select items.operation, items.number
from sideline.operation_items as items
join sideline.operations on operations.id = items.operation
left join sideline.operation_counts as counts
  on counts.operation = items.operation
 and counts.topic = items.topic
 and counts.partition = items.home
where items.queue = %(queue)s
  and items.state = 'waiting'
  and items.number > coalesce(counts.seen, -1)
  and operations.pipeline = %(pipeline)s
  and operations.state in ('running', 'paused', 'stopped')

-- name: look_back
-- Operations look at the items of a home from the first one on again: what is over is marked.
with home as (
    update sideline.operation_counts as counts
    set seen = -1
    from sideline.operation_counts as before, sideline.queues
    where queues.id = %(into)s
      and counts.operation = any(%(operations)s::bigint[])
      and counts.topic = queues.topic
      and counts.partition = queues.home
      and before.operation = counts.operation
      and before.topic = counts.topic
      and before.partition = counts.partition
    returning counts.operation, counts.topic, counts.partition, before.seen
)
update sideline.operation_items as items
set state = 'done'
from home
where items.operation = home.operation
  and items.topic = home.topic
  and items.home = home.partition
  and items.state = 'waiting'
  and items.number <= home.seen

-- name: redirect_items
-- A queue joined another: what was to happen to it happens there.
update sideline.operation_items as items
set queue = %(into)s,
    home = queues.home
from sideline.queues, unnest(%(operations)s::bigint[], %(numbers)s::bigint[])
    as given (operation, number)
where queues.id = %(into)s
  and items.operation = given.operation
  and items.number = given.number

-- name: count_operation
-- How far an operation is, at home in this partition.
insert into sideline.operation_counts (
    operation, topic, partition, applied, failed, discarded, restored, seen
)
values (
    %(operation)s, %(topic)s, %(partition)s, %(applied)s, %(failed)s, %(discarded)s, %(restored)s,
    %(seen)s
)
on conflict (operation, topic, partition) do update
set applied = operation_counts.applied + excluded.applied,
    failed = operation_counts.failed + excluded.failed,
    discarded = operation_counts.discarded + excluded.discarded,
    restored = operation_counts.restored + excluded.restored,
    seen = greatest(operation_counts.seen, excluded.seen)

-- name: waits_at_home
-- How long operations are left alone in this partition, for their rate or for the outside world.
select operations.id,
       greatest(0, extract(epoch from counts.due_at - clock_timestamp()))::double precision,
       counts.attempts
from sideline.operations
join sideline.operation_counts as counts on counts.operation = operations.id
where operations.pipeline = %(pipeline)s
  and operations.state in ('running', 'paused')
  and counts.topic = %(topic)s
  and counts.partition = %(partition)s
  and counts.due_at is not null

-- name: defer_operation
-- An operation is left alone in this partition for so long.
insert into sideline.operation_counts (operation, topic, partition, due_at, attempts)
select id, %(topic)s, %(partition)s,
       clock_timestamp() + make_interval(secs => %(seconds)s), %(attempts)s
from sideline.operations
where id = %(operation)s
on conflict (operation, topic, partition) do update
set due_at = excluded.due_at,
    attempts = excluded.attempts

-- name: stop_failing_operation
-- Too much of it failed again: at least its share, of at least so many events.
update sideline.operations
set state = 'stopped',
    note = format('%%s of %%s events failed again', so_far.failed, so_far.tried),
    updated_at = now()
from (
    select sum(failed) as failed, sum(applied + failed) as tried
    from sideline.operation_counts
    where operation = %(operation)s
) as so_far
where operations.id = %(operation)s
  and operations.state = 'running'
  and so_far.tried >= %(least)s
  and so_far.failed >= operations.stop_at * so_far.tried

-- name: stop_operation
-- It cannot be carried out as things are.
update sideline.operations
set state = 'stopped',
    note = %(note)s,
    updated_at = now()
where id = %(operation)s
  and state = 'running'

-- name: note_operation
-- It waits for the outside world, or no longer does.
update sideline.operations
set note = %(note)s,
    updated_at = now()
where id = %(operation)s
  and state = 'running'
  and note is distinct from %(note)s
  and (note is null or note like 'waits: %%')

-- Alerts and pauses

-- name: open_alerts
-- What is open of a pipeline.
select id, kind, subject, message, raised_at
from sideline.alerts
where pipeline = %(pipeline)s
  and cleared_at is null

-- name: raise_alert
-- Only the driver that stands may raise one, and only where none is open.
insert into sideline.alerts (pipeline, kind, subject, message, raised_at)
select name, %(kind)s, %(subject)s, %(message)s, coalesce(%(raised_at)s, now())
from sideline.pipelines
where name = %(pipeline)s
  and epoch = %(epoch)s
on conflict (pipeline, kind, subject) where cleared_at is null do nothing
returning id, raised_at

-- name: record_alert
-- One that was raised and cleared while the ledger was out of reach.
insert into sideline.alerts (pipeline, kind, subject, message, raised_at, cleared_at)
select name, %(kind)s, %(subject)s, %(message)s, %(raised_at)s, clock_timestamp()
from sideline.pipelines
where name = %(pipeline)s
  and epoch = %(epoch)s
returning cleared_at

-- name: word_alert
-- The numbers of an open alert have changed; it is not raised again.
update sideline.alerts
set message = %(message)s,
    updated_at = now()
where id = %(id)s
  and cleared_at is null

-- name: clear_alert
-- It is over; only the driver that stands may say so.
update sideline.alerts
set cleared_at = now(),
    updated_at = now()
from sideline.pipelines
where alerts.id = %(id)s
  and alerts.cleared_at is null
  and pipelines.name = alerts.pipeline
  and pipelines.epoch = %(epoch)s
returning alerts.cleared_at

-- name: list_open_alerts
-- Open ones of all pipelines or of one, the newest first.
select id, pipeline, kind, subject, message, raised_at, updated_at, cleared_at
from sideline.alerts
where cleared_at is null
  and (%(pipeline)s::text is null or pipeline = %(pipeline)s)
  and (%(after)s::bigint is null
       or (raised_at, id) < (select after.raised_at, after.id
                             from sideline.alerts as after
                             where after.id = %(after)s))
order by raised_at desc, id desc
limit %(limit)s

-- name: list_cleared_alerts
-- Those that are over, the newest first, behind the one that the last page ended with.
select id, pipeline, kind, subject, message, raised_at, updated_at, cleared_at
from sideline.alerts
where cleared_at is not null
  and (%(pipeline)s::text is null or pipeline = %(pipeline)s)
  and (%(after)s::bigint is null
       or (raised_at, id) < (select after.raised_at, after.id
                             from sideline.alerts as after
                             where after.id = %(after)s))
order by raised_at desc, id desc
limit %(limit)s

-- name: alert
-- Whether an alert is there, and whether it is over.
select cleared_at is not null
from sideline.alerts
where id = %(id)s

-- name: count_open_alerts
-- How many are open.
select count(*)
from sideline.alerts
where cleared_at is null
  and (%(pipeline)s::text is null or pipeline = %(pipeline)s)

-- name: pause_pipeline
-- Pause a pipeline, or let it go on; what it was before.
with before as (
    select name, paused
    from sideline.pipelines
    where name = %(pipeline)s
    for update
)
update sideline.pipelines
set paused = %(paused)s
from before
where pipelines.name = before.name
returning before.paused

-- name: pause_partition
-- The same for a partition.
with before as (
    select pipeline, topic, partition, paused
    from sideline.progress
    where pipeline = %(pipeline)s
      and topic = %(topic)s
      and partition = %(partition)s
    for update
)
update sideline.progress
set paused = %(paused)s
from before
where progress.pipeline = before.pipeline
  and progress.topic = before.topic
  and progress.partition = before.partition
returning before.paused

-- name: note_pause
-- Who paused last, and why; nothing where nothing is paused any more.
update sideline.pipelines
set paused_note = case
        when paused or exists (
            select
            from sideline.progress
            where progress.pipeline = pipelines.name
              and progress.paused
        )
        then coalesce(%(note)s, paused_note)
    end
where name = %(pipeline)s

-- name: is_paused
-- Whether a pipeline as a whole is paused.
select paused, paused_note
from sideline.pipelines
where name = %(pipeline)s

-- Reading: what a person sees of what waits. A page begins behind the last one's end, never at a
-- count; which rows it holds is found by an index before anything wide is read.

-- name: waiting_pipelines
-- All pipelines, and how much of each waits.
select pipelines.name,
       coalesce(sum(progress.parked), 0)::bigint as parked,
       coalesce(sum(progress.aside), 0)::bigint as aside
from sideline.pipelines
left join sideline.progress on progress.pipeline = pipelines.name
group by pipelines.name

-- name: waiting_topics
-- Every topic whose keys may be aside: what the pipeline reads now, and what it read before.
select topic
from sideline.progress
where pipeline = %(pipeline)s
union
select unnest(topics)
from sideline.pipelines
where name = %(pipeline)s

-- name: causes_named
-- The causes that a fingerprint or an error class names; a class also without its module.
select distinct fingerprint
from sideline.causes
where pipeline = %(pipeline)s
  and (
      fingerprint = %(cause)s
      or error = %(cause)s
      or right(error, length(%(cause)s) + 1) = '.' || %(cause)s
  )

-- name: queues_of_keys
-- Where keys wait.
select distinct queue
from sideline.keys
where pipeline = %(pipeline)s
  and topic = any(%(topics)s::text[])
  and digest = any(%(digests)s::uuid[])

-- name: heads
-- Why queues wait: the causes of their first events.
select head.fingerprint
from unnest(%(queues)s::bigint[]) as wanted (queue)
cross join lateral (
    select events.fingerprint
    from sideline.events
    where events.queue = wanted.queue
    order by events.place
    limit 1
) as head
where head.fingerprint is not null

-- name: keys_in_order
-- A page of keys aside, oldest first.
select keys.topic, keys.digest, queues.since as at, queues.id as number
from sideline.queues
join sideline.keys on keys.queue = queues.id
where queues.pipeline = %(pipeline)s
  and (%(topic)s::text is null or queues.topic = %(topic)s)
  and queues.since >= coalesce(%(since)s::timestamptz, '-infinity')
  and queues.since < coalesce(%(until)s::timestamptz, 'infinity')
  and (queues.since, queues.id)
      >= (coalesce(%(after_at)s::timestamptz, '-infinity'), %(after_number)s::bigint)
  and (queues.since, queues.id, keys.digest)
      > (
          coalesce(%(after_at)s::timestamptz, '-infinity'),
          %(after_number)s::bigint,
          %(after_digest)s::uuid
      )
order by queues.since, queues.id, keys.digest
limit %(limit)s

-- name: keys_of_causes
-- The same, of keys whose first event failed for one of some causes.
select page.topic, page.digest, page.at, page.number
from unnest(%(fingerprints)s::text[]) as wanted (fingerprint)
cross join lateral (
    select keys.topic, keys.digest, events.parked_at as at, events.place as number
    from sideline.events
    join sideline.keys on keys.queue = events.queue
    where events.pipeline = %(pipeline)s
      and events.fingerprint = wanted.fingerprint
      and events.state = 'parked'
      and (%(topic)s::text is null or events.topic = %(topic)s)
      and events.parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
      and events.parked_at < coalesce(%(until)s::timestamptz, 'infinity')
      and (events.parked_at, events.place)
          >= (coalesce(%(after_at)s::timestamptz, '-infinity'), %(after_number)s::bigint)
      and (events.parked_at, events.place, keys.digest)
          > (
              coalesce(%(after_at)s::timestamptz, '-infinity'),
              %(after_number)s::bigint,
              %(after_digest)s::uuid
          )
      and not exists (
          select
          from sideline.events as earlier
          where earlier.queue = events.queue
            and earlier.place < events.place
      )
    order by events.parked_at, events.place, keys.digest
    limit %(limit)s
) as page
order by page.at, page.number, page.digest
limit %(limit)s

-- name: keys_shown
-- Keys aside, each with what waits and why: the first event of its queue.
select keys.pipeline, keys.topic, keys.digest, keys.key, keys.derived, keys.queue, queues.home,
       queues.events, queues.since, head.topic as head_topic, head.partition as head_partition,
       head."offset" as head_offset, head.why, head.error, head.message, head.fingerprint,
       head.generation
from unnest(%(topics)s::text[], %(digests)s::uuid[]) with ordinality
    as wanted (topic, digest, number)
join sideline.keys
  on keys.pipeline = %(pipeline)s
 and keys.topic = wanted.topic
 and keys.digest = wanted.digest
join sideline.queues on queues.id = keys.queue
left join lateral (
    select *
    from sideline.events
    where events.queue = keys.queue
    order by events.place
    limit 1
) as head on true
order by wanted.number

-- name: causes_in_order
-- A page of causes, the one that was seen first at the head; example and message are the last's.
select sum(causes.parked)::bigint as parked,
       sum(causes.skipped)::bigint as skipped,
       (
           select coalesce(sum(everything.parked), 0)::bigint
           from sideline.causes as everything
           where everything.pipeline = %(pipeline)s
       ) as parked_in_all,
       causes.pipeline,
       causes.fingerprint,
       (array_agg(causes.error order by causes.last_at desc))[1] as error,
       (array_agg(causes.stage order by causes.last_at desc))[1] as stage,
       (array_agg(causes.place order by causes.last_at desc))[1] as place,
       (array_agg(causes.message order by causes.last_at desc))[1] as message,
       (array_agg(causes.topic order by causes.last_at desc))[1] as topic,
       (array_agg(causes.partition order by causes.last_at desc))[1] as partition,
       (array_agg(causes.last_offset order by causes.last_at desc))[1] as "offset",
       min(causes.first_at) as first_at,
       max(causes.last_at) as last_at
from sideline.causes
where causes.pipeline = %(pipeline)s
  and (%(topic)s::text is null or causes.topic = %(topic)s)
  and (
      %(fingerprints)s::text[] is null
      or causes.fingerprint = any(%(fingerprints)s::text[])
  )
group by causes.pipeline, causes.fingerprint
having sum(causes.parked) + sum(causes.skipped) > 0
   and max(causes.last_at) >= coalesce(%(since)s::timestamptz, '-infinity')
   and min(causes.first_at) < coalesce(%(until)s::timestamptz, 'infinity')
   and (min(causes.first_at), causes.fingerprint)
       > (coalesce(%(after_at)s::timestamptz, '-infinity'), %(after_text)s)
order by min(causes.first_at), causes.fingerprint
limit %(limit)s

-- name: events_in_order
-- A page of parked events, oldest first.
select topic, partition, "offset", incarnation, parked_at as at, place as number
from sideline.events
where pipeline = %(pipeline)s
  and state = 'parked'
  and (%(topic)s::text is null or topic = %(topic)s)
  and parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and parked_at < coalesce(%(until)s::timestamptz, 'infinity')
  and (parked_at, place)
      > (coalesce(%(after_at)s::timestamptz, '-infinity'), %(after_number)s::bigint)
order by parked_at, place
limit %(limit)s

-- name: dead_in_order
-- A page of dead events, oldest first.
select topic, partition, "offset", incarnation, parked_at as at, place as number
from sideline.events
where pipeline = %(pipeline)s
  and state = 'dead'
  and (%(topic)s::text is null or topic = %(topic)s)
  and (%(key)s::bytea is null or key = %(key)s)
  and (%(fingerprints)s::text[] is null or fingerprint = any(%(fingerprints)s::text[]))
  and parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and parked_at < coalesce(%(until)s::timestamptz, 'infinity')
  and (parked_at, place)
      > (coalesce(%(after_at)s::timestamptz, '-infinity'), %(after_number)s::bigint)
order by parked_at, place
limit %(limit)s

-- name: events_of_causes
-- A page of parked events that failed for one of some causes, oldest first.
select page.topic, page.partition, page."offset", page.incarnation, page.at, page.number
from unnest(%(fingerprints)s::text[]) as wanted (fingerprint)
cross join lateral (
    select topic, partition, "offset", incarnation, parked_at as at, place as number
    from sideline.events
    where events.pipeline = %(pipeline)s
      and events.fingerprint = wanted.fingerprint
      and events.state = 'parked'
      and (%(topic)s::text is null or events.topic = %(topic)s)
      and events.parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
      and events.parked_at < coalesce(%(until)s::timestamptz, 'infinity')
      and (events.parked_at, events.place)
          > (coalesce(%(after_at)s::timestamptz, '-infinity'), %(after_number)s::bigint)
    order by events.parked_at, events.place
    limit %(limit)s
) as page
order by page.at, page.number
limit %(limit)s

-- name: events_of_queues
-- A page of what waits in some queues, in the order of their replay.
select page.topic, page.partition, page."offset", page.incarnation, page.at, page.number
from unnest(%(queues)s::bigint[]) as wanted (queue)
cross join lateral (
    select topic, partition, "offset", incarnation, parked_at as at, place as number
    from sideline.events
    where events.queue = wanted.queue
      and (
          %(fingerprints)s::text[] is null
          or events.fingerprint = any(%(fingerprints)s::text[])
      )
      and (%(topic)s::text is null or events.topic = %(topic)s)
      and events.parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
      and events.parked_at < coalesce(%(until)s::timestamptz, 'infinity')
      and events.place > %(after_number)s::bigint
    order by events.place
    limit %(limit)s
) as page
order by page.number
limit %(limit)s

-- name: events_to_export
-- Everything of a kind that is parked, in the order of replay, and how much there is to fetch.
select topic, partition, "offset", incarnation,
       coalesce(octet_length(value), 0) + coalesce(octet_length(key), 0) as bytes
from sideline.events
where pipeline = %(pipeline)s
  and state = 'parked'
  and (%(topic)s::text is null or topic = %(topic)s)
  and (%(queues)s::bigint[] is null or queue = any(%(queues)s::bigint[]))
  and (%(fingerprints)s::text[] is null or fingerprint = any(%(fingerprints)s::text[]))
  and parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and parked_at < coalesce(%(until)s::timestamptz, 'infinity')
order by place

-- name: dead_to_export
-- The same of dead events; without those whose bytes were erased.
select topic, partition, "offset", incarnation,
       coalesce(octet_length(value), 0) + coalesce(octet_length(key), 0) as bytes
from sideline.events
where pipeline = %(pipeline)s
  and state = 'dead'
  and erased_at is null
  and (%(topic)s::text is null or topic = %(topic)s)
  and (%(key)s::bytea is null or key = %(key)s)
  and (%(fingerprints)s::text[] is null or fingerprint = any(%(fingerprints)s::text[]))
  and parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and parked_at < coalesce(%(until)s::timestamptz, 'infinity')
order by place

-- name: events_shown
-- Events of a list; their values stay where they are.
select events.pipeline, events.topic, events.partition, events."offset", events.incarnation,
       events.place, events.queue, events.state, events.why, events.key,
       octet_length(events.value) as value_bytes, events.timestamp_ms, events.stage,
       events.error, events.message, events.fingerprint, events.handler_version,
       events.attempts, events.generation, events.parked_at
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[]
) with ordinality as wanted (topic, partition, "offset", incarnation, number)
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = wanted.topic
 and events.partition = wanted.partition
 and events."offset" = wanted."offset"
 and events.incarnation = wanted.incarnation
order by wanted.number

-- name: frame_parked_bounds
-- Where every so many parked events end: ranges for tasks that read them side by side.
select parked_at, place
from (
    select parked_at, place, row_number() over (order by parked_at, place) as number
    from sideline.events
    where pipeline = %(pipeline)s
      and state = 'parked'
) as numbered
where number %% %(size)s = 0
order by parked_at, place

-- name: frame_parked
-- The parked events of a range; when an event was first parked never changes.
select pipeline, topic, partition, "offset", incarnation, state, why, place, queue, key,
       timestamp_ms, stage, error, message, traceback, fingerprint, handler_version, attempts,
       generation, parked_at, updated_at, held_in, erased_at,
       case when %(payload)s then value end as value,
       case when %(payload)s then header_names else '{}' end as header_names,
       case when %(payload)s then header_values else '{}' end as header_values
from sideline.events
where pipeline = %(pipeline)s
  and state = 'parked'
  and (%(first)s or (parked_at, place) > (%(after_0)s::timestamptz, %(after_1)s::bigint))
  and (%(last)s or (parked_at, place) <= (%(until_0)s::timestamptz, %(until_1)s::bigint))
order by parked_at, place

-- name: frame_history_bounds
-- The same for all events of a pipeline, whatever became of them.
select topic, partition, "offset", incarnation
from (
    select topic, partition, "offset", incarnation,
           row_number() over (order by topic, partition, "offset", incarnation) as number
    from sideline.known_events
    where pipeline = %(pipeline)s
) as numbered
where number %% %(size)s = 0
order by topic, partition, "offset", incarnation

-- name: frame_history
-- All events of a range.
select pipeline, topic, partition, "offset", incarnation, state, why, place, queue, key,
       timestamp_ms, stage, error, message, traceback, fingerprint, handler_version, attempts,
       generation, parked_at, updated_at, held_in, erased_at,
       case when %(payload)s then value end as value,
       case when %(payload)s then header_names else '{}' end as header_names,
       case when %(payload)s then header_values else '{}' end as header_values
from sideline.known_events
where pipeline = %(pipeline)s
  and (
      %(first)s
      or (topic, partition, "offset", incarnation)
         > (%(after_0)s::text, %(after_1)s::integer, %(after_2)s::bigint, %(after_3)s::integer)
  )
  and (
      %(last)s
      or (topic, partition, "offset", incarnation)
         <= (%(until_0)s::text, %(until_1)s::integer, %(until_2)s::bigint, %(until_3)s::integer)
  )
order by topic, partition, "offset", incarnation

-- name: frame_progress
-- How far each partition is.
select pipeline, topic, partition, next_offset, consumed, applied, filtered, skipped, unknown,
       parked, retrying, dead, discarded, duplicate, aside, event_at, updated_at, paused,
       attempts, due_at, trouble
from sideline.progress
where pipeline = %(pipeline)s
order by topic, partition

-- name: events_exported
-- Events with everything that is needed to publish them again.
select events.pipeline, events.topic, events.partition, events."offset", events.incarnation,
       events.key, events.value, events.header_names, events.header_values, events.timestamp_ms,
       events.held_in, events.why, events.error, events.message, events.fingerprint,
       events.generation, events.parked_at
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[]
) with ordinality as wanted (topic, partition, "offset", incarnation, number)
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = wanted.topic
 and events.partition = wanted.partition
 and events."offset" = wanted."offset"
 and events.incarnation = wanted.incarnation
order by wanted.number

-- name: events_by_id
-- Whatever the ledger knows of an event, in whichever pipelines; its value up to a bound.
select events.pipeline, events.topic, events.partition, events."offset", events.incarnation,
       events.place, events.queue, events.state, events.why, events.key,
       substring(events.value for coalesce(%(bytes)s, 2147483647)) as value,
       octet_length(events.value) as value_bytes, events.header_names, events.header_values,
       events.timestamp_ms, events.held_in, events.stage, events.error, events.message,
       events.traceback, events.fingerprint, events.handler_version, events.attempts,
       events.generation, events.parked_at, events.updated_at
from sideline.pipelines
join sideline.known_events as events on events.pipeline = pipelines.name
where (%(pipeline)s::text is null or pipelines.name = %(pipeline)s)
  and events.topic = %(topic)s
  and events.partition = %(partition)s
  and events."offset" = %(offset)s
order by events.pipeline, events.incarnation desc

-- name: queue_around
-- An event's neighbours in its queue, so many to each side, with the distance.
(
    select topic, partition, "offset", why, -row_number() over (order by place desc) as distance
    from sideline.events
    where queue = %(queue)s
      and place < %(place)s
    order by place desc
    limit %(limit)s
)
union all
(
    select topic, partition, "offset", why, row_number() over (order by place) as distance
    from sideline.events
    where queue = %(queue)s
      and place > %(place)s
    order by place
    limit %(limit)s
)
order by distance

-- name: queue_counts
-- How many wait in a queue, and how many of them before and behind a place, counted to a bound.
select queues.events, queues.home, queues.since,
       (
           select count(*)
           from (
               select
               from sideline.events
               where events.queue = queues.id
                 and events.place < %(place)s
               limit %(most)s
           ) as before
       ) as before,
       (
           select count(*)
           from (
               select
               from sideline.events
               where events.queue = queues.id
                 and events.place > %(place)s
               limit %(most)s
           ) as behind
       ) as behind
from sideline.queues
where queues.id = %(queue)s

-- name: keys_of_queue
-- The keys that wait in a queue, to a bound.
select key, derived
from sideline.keys
where queue = %(queue)s
order by version, digest
limit %(limit)s

-- Accounting: counters and rows of one snapshot, side by side.

-- name: check_partitions
-- What each partition's counters say, and what the ledger holds of it.
select topic, partition, progress.pipeline is not null as known,
       coalesce(progress.consumed, 0) as consumed,
       coalesce(progress.applied, 0) as applied,
       coalesce(progress.filtered, 0) as filtered,
       coalesce(progress.skipped, 0) as skipped,
       coalesce(progress.unknown, 0) as unknown,
       coalesce(progress.parked, 0) as parked,
       coalesce(progress.retrying, 0) as retrying,
       coalesce(progress.dead, 0) as dead,
       coalesce(progress.discarded, 0) as discarded,
       coalesce(progress.duplicate, 0) as duplicate,
       coalesce(progress.aside, 0) as aside,
       coalesce(waiting.parked, 0) as parked_events,
       coalesce(waiting.retrying, 0) as retrying_events,
       coalesce(waiting.dead, 0) as dead_events,
       coalesce(waiting.discarded, 0) as discarded_events,
       coalesce(home.queues, 0) as queues,
       -- Those of a slice that is not applied yet are counted by cause already.
       coalesce(why.skipped, 0)::bigint - coalesce((progress.pending ->> 'skipped')::bigint, 0)
           as skipped_by_cause,
       coalesce(progress.outbox_last - progress.outbox_sent, 0) as unsent,
       coalesce(box.records, 0) as unsent_records
from (
    select *
    from sideline.progress
    where pipeline = %(pipeline)s
) as progress
full join (
    select topic, partition,
           -- What an unapplied slice found here is still counted as what it was.
           count(*) filter (where coalesce(becomes, state) = 'parked') as parked,
           count(*) filter (where coalesce(becomes, state) = 'retrying') as retrying,
           -- What was imported somebody else has consumed.
           count(*) filter (where coalesce(becomes, state) = 'dead' and incarnation >= 0) as dead,
           count(*) filter (where coalesce(becomes, state) = 'discarded' and incarnation >= 0)
               as discarded
    from sideline.events
    where pipeline = %(pipeline)s
      and state in ('parked', 'retrying', 'dead', 'discarded', 'pending')
      and not fresh
    group by topic, partition
) as waiting using (topic, partition)
full join (
    select topic, home as partition, count(*) as queues
    from sideline.queues
    where pipeline = %(pipeline)s
    group by topic, home
) as home using (topic, partition)
full join (
    select topic, partition, sum(skipped) as skipped
    from sideline.causes
    where pipeline = %(pipeline)s
    group by topic, partition
) as why using (topic, partition)
full join (
    select outbox.topic, outbox.partition,
           -- Of a row that stands for many, some may have been sent.
           sum(outbox.records - greatest(0, sent.outbox_sent - outbox.number + 1))::bigint as records
    from sideline.outbox
    left join sideline.progress as sent using (pipeline, topic, partition)
    where outbox.pipeline = %(pipeline)s
    group by outbox.topic, outbox.partition
) as box using (topic, partition)
order by topic, partition

-- name: check_causes
-- Causes whose counter is not the number of events that are parked because of them.
select topic, partition, fingerprint, coalesce(causes.parked, 0) as counted,
       coalesce(failed.events, 0) as found
from (
    select topic, partition, fingerprint, parked
    from sideline.causes
    where pipeline = %(pipeline)s
) as causes
full join (
    select topic, partition, fingerprint, count(*) as events
    from sideline.events
    where pipeline = %(pipeline)s
      and state in ('parked', 'pending')
      and coalesce(becomes, state) = 'parked'
      and why = 'failed'
    group by topic, partition, fingerprint
) as failed using (topic, partition, fingerprint)
where coalesce(causes.parked, 0) <> coalesce(failed.events, 0)
order by topic, partition, fingerprint

-- name: check_queues
-- Queues whose counter is not the number of events in them, that nobody waits in, or without a key.
select queues.id, queues.topic, queues.home, queues.events as counted,
       coalesce(waiting.events, 0) as found,
       exists (select from sideline.keys where keys.queue = queues.id) as has_key
from sideline.queues
left join (
    select queue, count(*) as events
    from sideline.events
    where pipeline = %(pipeline)s
      and queue is not null
    group by queue
) as waiting on waiting.queue = queues.id
where queues.pipeline = %(pipeline)s
  and (
      queues.events <> coalesce(waiting.events, 0)
      or waiting.events is null
      or not exists (select from sideline.keys where keys.queue = queues.id)
  )
order by queues.topic, queues.home, queues.id

-- name: check_loose
-- Events with a key that wait in no queue: the next event of that key would overtake them.
select topic, partition, "offset"
from sideline.events
where pipeline = %(pipeline)s
  and state = 'parked'
  and key is not null
  and queue is null
  and not alone
order by topic, partition, "offset"

-- By hand.

-- name: stuck_partitions
-- A partition in every pipeline that reads it: the event that it waits for, and who is in the way.
select progress.pipeline, progress.stuck_at, progress.park_at, progress.park_reason,
       progress.trouble, progress.attempts,
       progress.paused or pipelines.paused as paused,
       exists (
           select
           from sideline.events
           where events.pipeline = progress.pipeline
             and events.topic = progress.topic
             and events.partition = progress.partition
             and events."offset" = %(offset)s
             and events.incarnation = progress.incarnation
             and events.state = 'parked'
       ) as parked
from sideline.progress
join sideline.pipelines on pipelines.name = progress.pipeline
where (%(pipeline)s::text is null or progress.pipeline = %(pipeline)s)
  and progress.topic = %(topic)s
  and progress.partition = %(partition)s
order by progress.pipeline

-- name: ask_to_park
-- A person wants an event set aside: only the one that its partition waits for, and at once.
update sideline.progress
set park_at = %(offset)s,
    park_reason = %(reason)s,
    due_at = now()
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and stuck_at = %(offset)s
  and not exists (
      select
      from sideline.events
      where events.pipeline = progress.pipeline
        and events.topic = progress.topic
        and events.partition = progress.partition
        and events."offset" = %(offset)s
        and events.incarnation = progress.incarnation
        and events.state = 'parked'
  )
returning pipeline

-- name: suspects
-- Events that were in the hands of dying workers, as often as it takes to be sure.
select topic, partition, in_hand, deaths, trouble
from sideline.progress
where pipeline = %(pipeline)s
  and (topic, partition) in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))
  and in_hand >= next_offset
  and deaths >= %(enough)s

-- name: forget_suspects
-- Progress has passed them: parked, left out, or harmless in the end.
update sideline.progress
set in_hand = null,
    deaths = 0
where pipeline = %(pipeline)s
  and (topic, partition) in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))
  and in_hand < next_offset

-- name: dead_backends
-- Sessions of a worker that is dead: in the middle of a statement they have not noticed.
select distinct activity.pid
from sideline.progress
join pg_stat_activity as activity
  on activity.pid = progress.backend_pid
 and activity.backend_start = progress.backend_start
where progress.pipeline = %(pipeline)s
  and progress.lease = %(lease)s::bigint[]

-- name: count_death
-- A worker died with this event in hand; how often that has happened now.
update sideline.progress
set in_hand = %(offset)s,
    deaths = case when in_hand = %(offset)s then deaths + 1 else 1 end,
    trouble = %(trouble)s
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and next_offset <= %(offset)s
returning deaths

-- name: count_death_of_replayed
-- The same for an event that came back: progress has passed it long ago, so its own row counts.
update sideline.events
set deaths = deaths + 1
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and "offset" = %(offset)s
  and state in ('parked', 'dead', 'pending')
returning deaths

-- name: bury
-- Free what a dead worker held: it calls nobody any more.
update sideline.progress
set released = true,
    owner = null,
    updated_at = now()
where pipeline = %(pipeline)s
  and lease = %(lease)s::bigint[]

-- One statement a slice

-- name: fence_at_once
-- Like fence_at, for a slice in which nothing failed and that is one statement with its fence.
-- Where keys live in several partitions it takes more than one.
update sideline.progress
set next_offset = %(end)s,
    consumed = consumed + %(consumed)s,
    applied = applied + %(applied)s,
    filtered = filtered + %(filtered)s,
    event_at = coalesce(%(event_at)s, event_at),
    attempts = 0,
    trouble = null,
    stuck_at = null,
    park_at = case when park_at >= %(end)s then park_at end,
    updated_at = now()
where ctid = %(ctid)s::tid
  and pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and next_offset = %(start)s
  and not shared
returning ctid::text as place

-- Who did what

-- name: record_change
-- A change by a person, in the transaction that makes it.
insert into sideline.audit (actor, action, pipeline, subject, count, reason)
values (%(actor)s, %(action)s, %(pipeline)s, %(subject)s, %(count)s, %(reason)s)

-- name: changes
-- Changes by people, the newest first, behind the one that the last page ended with.
select id, at, actor, action, pipeline, subject, count, reason
from sideline.audit
where (%(pipeline)s::text is null or pipeline = %(pipeline)s)
  and (%(action)s::text is null or action = %(action)s)
  and (%(actor)s::text is null or actor = %(actor)s or split_part(actor, '@', 1) = %(actor)s)
  and at >= coalesce(%(since)s::timestamptz, '-infinity')
  and at < coalesce(%(until)s::timestamptz, 'infinity')
  and (%(after)s::bigint is null or id < %(after)s)
order by id desc
limit %(limit)s

-- What people want done with it. The first ones say what is chosen; they stand for {chosen} in
-- those that follow, so that what is shown, counted, hashed and frozen is one set.

-- name: chosen_keys
-- For a release: queues, and events that stand alone. What is in braces is left out where nobody
-- asked for it. Where only the first ones are wanted, each part is cut off by itself, so that no
-- more is read than that.
(
    select queues.topic, queues.home, queues.id as queue, null::integer as partition,
           null::bigint as "offset", null::integer as incarnation, queues.since as at,
           queues.id as tie, queues.events, null::bigint as of_queue, null::bigint as place,
           null::integer as generation, null::text as fingerprint, null::text as handler_version
    from sideline.queues
    where queues.pipeline = %(pipeline)s
      and (%(topic)s::text is null or queues.topic = %(topic)s)
      and queues.since >= coalesce(%(since)s::timestamptz, '-infinity')
      and queues.since < coalesce(%(until)s::timestamptz, 'infinity')
      and queues.since < %(boundary)s::timestamptz
      and (%(queues)s::bigint[] is null or queues.id = any(%(queues)s::bigint[]))
      {if fingerprints and exists (
          select
          from sideline.events
          where events.pipeline = %(pipeline)s
            and events.queue = queues.id
            and events.state = 'parked'
            and events.why = 'failed'
            and events.fingerprint = any(%(fingerprints)s::text[])
      )}
    {first queues.since, queues.id}
)
union all
(
    select events.topic, events.partition, null, events.partition, events."offset",
           events.incarnation, events.parked_at, events.place, 1, null, events.place,
           events.generation, events.fingerprint, events.handler_version
    from sideline.events
    where events.pipeline = %(pipeline)s
      and events.state = 'parked'
      and events.queue is null
      and (%(topic)s::text is null or events.topic = %(topic)s)
      and events.parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
      and events.parked_at < coalesce(%(until)s::timestamptz, 'infinity')
      and events.parked_at < %(boundary)s::timestamptz
      and (%(queues)s::bigint[] is null or events.place = any(%(places)s::bigint[]))
      and (
          %(fingerprints)s::text[] is null
          or events.fingerprint = any(%(fingerprints)s::text[])
      )
    {first events.parked_at, events.place}
)
{first at, tie}

-- name: chosen_waiting
-- For a discard: the events of chosen keys that failed, or all of them, and those that stand alone.
select events.topic, queues.home, null::bigint as queue, events.partition, events."offset",
       events.incarnation, keys.at, events.place as tie, 1::bigint as events,
       events.queue as of_queue, events.place, events.generation, events.fingerprint,
       events.handler_version
from ({keys}) as keys
join sideline.events
  on events.queue = keys.queue
 and events.state = 'parked'
 and (
     %(followers)s
     or events.why = 'failed'
    and (
        %(fingerprints)s::text[] is null
        or events.fingerprint = any(%(fingerprints)s::text[])
    )
 )
join sideline.queues on queues.id = events.queue
union all
select topic, home, null, partition, "offset", incarnation, at, tie, 1, of_queue, place,
       generation, fingerprint, handler_version
from ({keys}) as alone
where queue is null

-- name: chosen_events
-- Waiting events that were named one by one.
select events.topic, coalesce(queues.home, events.partition) as home, null::bigint as queue,
       events.partition, events."offset", events.incarnation, events.parked_at as at,
       events.place as tie, 1::bigint as events, events.queue as of_queue, events.place,
       events.generation, events.fingerprint, events.handler_version
from unnest(%(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[])
    as wanted (topic, partition, "offset")
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = wanted.topic
 and events.partition = wanted.partition
 and events."offset" = wanted."offset"
left join sideline.queues on queues.id = events.queue
where events.state = 'parked'
{first at, tie}

-- name: chosen_in_state
-- Dead events, or discarded ones, that can still be put back; since when they are that. Too late:
-- the queue that it left is gone or has come further, or its bytes are erased. Dead ones go in the
-- order in which they failed first, however often since.
select events.topic, coalesce(queues.home, events.partition) as home, null::bigint as queue,
       events.partition, events."offset", events.incarnation, events.updated_at as at,
       events.place as tie, 1::bigint as events, events.former_queue as of_queue, events.place,
       events.generation, events.fingerprint, events.handler_version
from sideline.events
left join sideline.queues on queues.id = events.former_queue
where events.pipeline = %(pipeline)s
  and events.state = %(state)s
  -- What was imported may be years old, and only an owner of its partition can handle it.
  and %(apart)s = (
      %(kind)s = 'release'
      and events.imported_from is not null
      and not exists (
          select
          from sideline.progress
          join sideline.pipelines on pipelines.name = progress.pipeline
          where progress.pipeline = events.pipeline
            and progress.topic = events.topic
            and progress.partition = events.partition
            and pipelines.order_free
      )
  )
  and (%(topic)s::text is null or events.topic = %(topic)s)
  and events.updated_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and events.updated_at < coalesce(%(until)s::timestamptz, 'infinity')
  and events.updated_at < %(boundary)s::timestamptz
  and (%(keys)s::bytea[] is null or events.key = any(%(keys)s::bytea[]))
  and (%(fingerprints)s::text[] is null or events.fingerprint = any(%(fingerprints)s::text[]))
  and (
      %(topics)s::text[] is null
      or (events.topic, events.partition, events."offset") in (
          select *
          from unnest(%(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[])
      )
  )
  and %(late)s = (
      events.erased_at is not null
      or events.former_queue is not null
     and (queues.id is null or events.place <= queues.passed)
  )
{first {turn}}

-- name: plan_keys
-- How many keys single events belong to.
select count(distinct of_queue) as keys
from ({chosen}) as chosen
where of_queue is not null

-- name: plan_figures
-- What is chosen, in numbers: a row for all of it, then one for each cause and handler version of
-- what failed; what only follows has no cause. Chosen once, however much it is. The sums of hashes
-- are the same whatever the order.
with chosen as materialized (
    select queue, of_queue, events, at, place, generation, fingerprint, handler_version
    from ({chosen}) as wanted
)
select true as whole, null as fingerprint, null as handler_version, count(*) as items,
       coalesce(sum(events), 0)::bigint as events, count(queue) as queues,
       count(*) filter (where queue is null and of_queue is null) as alone, min(at) as oldest,
       coalesce(sum(hashint8extended(coalesce(queue, place), 1)), 0)::text as hash
from chosen
union all
select false, fingerprint, handler_version, count(*), 0, 0, 0, null,
       sum(hashint8extended(place, generation))::text
from (
    select events.fingerprint, events.handler_version, events.place, events.generation
    from chosen
    join sideline.events
      on events.queue = chosen.queue
     and events.pipeline = %(pipeline)s
     and events.state = 'parked'
     and events.why = 'failed'
    union all
    select fingerprint, handler_version, place, generation
    from chosen
    where queue is null
) as failed
group by fingerprint, handler_version

-- name: plan_sample
-- The first ones of what is chosen, with key and reason.
with chosen as ({chosen})
select chosen.topic, first.partition, first."offset", chosen.events, chosen.at,
       coalesce(keys.key, first.key) as key, first.why, first.error, first.message
from chosen
left join lateral (
    select keys.key
    from sideline.keys
    where keys.queue = chosen.queue
    order by keys.version, keys.digest
    limit 1
) as keys on true
left join lateral (
    select events.partition, events."offset", events.key, events.why, events.error, events.message
    from sideline.events
    where events.queue = chosen.queue
    order by events.place
    limit 1
) as head on true
left join sideline.events as single
  on single.pipeline = %(pipeline)s
 and single.topic = chosen.topic
 and single.partition = chosen.partition
 and single."offset" = chosen."offset"
 and single.incarnation = chosen.incarnation
cross join lateral (
    select coalesce(single.partition, head.partition) as partition,
           coalesce(single."offset", head."offset") as "offset",
           coalesce(single.key, head.key) as key,
           coalesce(single.why, head.why) as why,
           coalesce(single.error, head.error) as error,
           coalesce(single.message, head.message) as message
) as first
order by {turn}
limit %(sample)s

-- name: plan_causes
-- Causes by fingerprint, in the words of the last event of each.
select distinct on (fingerprint) fingerprint, error, place, message
from sideline.causes
where pipeline = %(pipeline)s
  and fingerprint = any(%(fingerprints)s::text[])
order by fingerprint, last_at desc

-- name: causes_meant
-- The causes that a fingerprint, its beginning or an error class names, and whether in full.
select distinct fingerprint,
       fingerprint = %(cause)s
       or error = %(cause)s
       or right(error, length(%(cause)s) + 1) = '.' || %(cause)s as in_full
from sideline.causes
where pipeline = %(pipeline)s
  and (
      starts_with(fingerprint, %(cause)s)
      or error = %(cause)s
      or right(error, length(%(cause)s) + 1) = '.' || %(cause)s
  )
order by fingerprint
limit 1000

-- name: queues_of_events
-- Where events wait that were named one by one, or that they stand alone.
select events.topic, events.partition, events."offset", events.state, events.queue, events.place
from unnest(%(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[])
    as wanted (topic, partition, "offset")
join sideline.known_events as events
  on events.pipeline = %(pipeline)s
 and events.topic = wanted.topic
 and events.partition = wanted.partition
 and events."offset" = wanted."offset"
order by events.incarnation desc

-- name: add_operation
-- What a person wants done, with the figures of the frozen set.
insert into sideline.operations (
    pipeline, kind, state, selection, reason, actor, items, events, plan, rate, stop_at, note
)
values (
    %(pipeline)s, %(kind)s, %(state)s, %(selection)s, %(reason)s, %(actor)s, %(items)s,
    %(events)s, %(plan)s, %(rate)s, %(stop_at)s, %(note)s
)
returning id

-- name: freeze
-- Exactly what was chosen, as the items of one operation, or of several that take turns.
insert into sideline.operation_items (
    operation, number, topic, home, queue, partition, "offset", incarnation
)
select step.operation, chosen.number, chosen.topic, chosen.home, chosen.queue, chosen.partition,
       chosen."offset", chosen.incarnation
from (
    select *, row_number() over (order by {turn}) as number
    from ({chosen}) as wanted
) as chosen
join unnest(%(operations)s::bigint[], %(firsts)s::bigint[], %(lasts)s::bigint[])
    as step (operation, first, last)
  on chosen.number between step.first and step.last

-- name: settle_homeless
-- Imported events of which no partition is read have no owner, no order and no counter: whoever
-- gives them up, or wants them back, does it at once.
with homeless as (
    select items.operation, items.number, items.topic, items.home, items."offset"
    from sideline.operation_items as items
    where items.operation = any(%(operations)s::bigint[])
      and items.state = 'waiting'
      and items.incarnation = -1
      and not exists (
          select
          from sideline.progress
          where progress.pipeline = %(pipeline)s
            and progress.topic = items.topic
            and progress.partition = items.home
      )
), settled as (
    update sideline.events
    set state = case when %(restore)s then events.former else 'discarded' end,
        former = case when %(restore)s then null else events.state end,
        updated_at = now()
    from homeless
    where events.pipeline = %(pipeline)s
      and events.topic = homeless.topic
      and events.partition = homeless.home
      and events."offset" = homeless."offset"
      and events.incarnation = -1
      and events.state = case when %(restore)s then 'discarded' else 'dead' end
      and (not %(restore)s or events.erased_at is null)
    returning homeless.operation, homeless.number, homeless.topic, homeless.home
), marked as (
    update sideline.operation_items as items
    set state = case when settled.number is null then 'gone' else 'done' end
    from homeless
    left join settled
      on settled.operation = homeless.operation
     and settled.number = homeless.number
    where items.operation = homeless.operation
      and items.number = homeless.number
), counted as (
    insert into sideline.operation_counts (operation, topic, partition, discarded, restored)
    select operation, topic, home,
           case when %(restore)s then 0 else count(*) end,
           case when %(restore)s then count(*) else 0 end
    from settled
    group by operation, topic, home
)
select count(*)
from homeless

-- name: operations_like
-- Another operation of the same plan that is under way.
select id, state
from sideline.operations
where pipeline = %(pipeline)s
  and plan = %(plan)s
  and id is distinct from %(but)s
  and state in ('running', 'paused')
order by id
limit 1

-- name: operations
-- Operations, the newest first, behind the one that the last page ended with.
select id, pipeline, kind, state, selection, reason, actor, items, events, plan, rate, stop_at,
       note, created_at, updated_at, ended_at,
       coalesce(counts.applied, 0)::bigint as applied,
       coalesce(counts.failed, 0)::bigint as failed,
       coalesce(counts.discarded, 0)::bigint as discarded,
       coalesce(counts.restored, 0)::bigint as restored
from sideline.operations
left join lateral (
    select sum(applied) as applied, sum(failed) as failed, sum(discarded) as discarded,
           sum(restored) as restored
    from sideline.operation_counts
    where operation_counts.operation = operations.id
) as counts on true
where (%(pipeline)s::text is null or pipeline = %(pipeline)s)
  and (%(id)s::bigint is null or id = %(id)s)
  and (not %(open)s or state in ('running', 'paused', 'stopped'))
  and (%(after)s::bigint is null or id < %(after)s)
order by id desc
limit %(limit)s

-- name: items_by_state
-- What has become of an operation's items.
select case
           when items.state = 'waiting' and items.number <= counts.seen then 'done'
           else items.state
       end as state,
       count(*)
from sideline.operation_items as items
left join sideline.operation_counts as counts
  on counts.operation = items.operation
 and counts.topic = items.topic
 and counts.partition = items.home
where items.operation = %(operation)s
group by 1

-- name: lock_operation
-- Nobody else changes it meanwhile.
select pipeline, kind, state
from sideline.operations
where id = %(operation)s
for update

-- name: change_operation
-- A person pauses it, lets it go on, or ends it.
update sideline.operations
set state = %(state)s,
    note = %(note)s,
    updated_at = now(),
    ended_at = case when %(state)s in ('cancelled', 'done') then now() end
where id = %(operation)s

-- name: operations_of_event
-- Which operations an event was in: by itself, or with the queue in which it waits, or waited
-- before it was given up.
select operations.id, operations.kind, operations.state, operations.actor, operations.reason,
       operations.created_at,
       case
           when items.state = 'waiting' and items.number <= counts.seen then 'done'
           else items.state
       end as item
from sideline.operation_items as items
join sideline.operations on operations.id = items.operation
left join sideline.operation_counts as counts
  on counts.operation = items.operation
 and counts.topic = items.topic
 and counts.partition = items.home
where operations.pipeline = %(pipeline)s
  and (
      items.queue in (
          select coalesce(events.queue, events.former_queue)
          from sideline.known_events as events
          where events.pipeline = %(pipeline)s
            and events.topic = %(topic)s
            and events.partition = %(partition)s
            and events."offset" = %(offset)s
            and events.incarnation = %(incarnation)s
      )
      or items.topic = %(topic)s
     and items.partition = %(partition)s
     and items."offset" = %(offset)s
     and items.incarnation = %(incarnation)s
  )
order by operations.id desc
limit %(limit)s

-- name: trial_events
-- What is chosen, with its bytes, key after key in the order of replay, up to a bound.
with chosen as ({chosen})
select coalesce(events.queue, -events.place) as lane, events.topic, events.partition,
       events."offset", events.incarnation, events.timestamp_ms, events.key, events.value,
       events.header_names, events.header_values, events.held_in
from chosen
join sideline.events
  on events.queue = chosen.queue
order by chosen.at, chosen.tie, events.place
limit %(most)s

-- name: trial_alone
-- The same of events that stand alone, or are named one by one.
with chosen as ({chosen})
select -events.place as lane, events.topic, events.partition, events."offset",
       events.incarnation, events.timestamp_ms, events.key, events.value, events.header_names,
       events.header_values, events.held_in
from chosen
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = chosen.topic
 and events.partition = chosen.partition
 and events."offset" = chosen."offset"
 and events.incarnation = chosen.incarnation
where chosen.queue is null
order by {turn}
limit %(most)s

-- The outbox: records that leave after COMMIT

-- name: number_outbox
-- Draw numbers for records. Whoever draws holds the partition's row, so that numbers become visible
-- in their order; the slice of an owner holds it already.
update sideline.progress
set outbox_last = outbox_last + %(count)s
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
returning outbox_last, ctid::text, (extract(epoch from now()) * 1000000)::bigint as stamp

-- name: put_outbox
-- Records, in the order in which they are to be sent.
insert into sideline.outbox (
    pipeline, topic, partition, number, to_topic, to_partition, key, value, header_names,
    header_values, timestamp_ms, of_topic, of_partition, of_offset
)
select %(pipeline)s, %(topic)s, %(partition)s, given.number, given.to_topic, given.to_partition,
       given.key, given.value, given.header_names::text[], given.header_values::bytea[],
       given.timestamp_ms, given.of_topic, given.of_partition, given.of_offset
from unnest(
    %(numbers)s::bigint[], %(to_topics)s::text[], %(to_partitions)s::integer[], %(keys)s::bytea[],
    %(values)s::bytea[], %(header_names)s::text[], %(header_values)s::text[],
    %(timestamps)s::bigint[], %(of_topics)s::text[], %(of_partitions)s::integer[],
    %(of_offsets)s::bigint[]
) as given (
    number, to_topic, to_partition, key, value, header_names, header_values, timestamp_ms,
    of_topic, of_partition, of_offset
)

-- name: refer_outbox
-- Copies of events that the ledger keeps: one row for many, and nothing of them a second time.
insert into sideline.outbox (
    pipeline, topic, partition, number, to_topic, to_partition, records, copies_as, copies_topic,
    copies_partitions, copies_offsets, copies_incarnations
)
values (
    %(pipeline)s, %(topic)s, %(partition)s, %(number)s, %(to_topic)s, %(to_partition)s,
    %(records)s, %(copies_as)s,
    %(copies_topic)s, %(copies_partitions)s::integer[], %(copies_offsets)s::bigint[],
    %(copies_incarnations)s::integer[]
)

-- name: read_outbox
-- The next rows of a partition, as many as fit into so many records and bytes and one at least; for
-- its owner only. No row: it has another owner. A row without a number: nothing is left.
select next.number, next.stamp, next.records, next.to_topic, next.to_partition, next.key,
       next.value, next.header_names, next.header_values, next.timestamp_ms, next.copies_as,
       progress.outbox_sent
from sideline.progress
left join lateral (
    select first.*,
           (extract(epoch from first.written_at) * 1000000)::bigint as stamp,
           sum(coalesce(octet_length(first.value), 0)) over (order by first.number)
               - coalesce(octet_length(first.value), 0) as bytes_before,
           sum(first.records) over (order by first.number) - first.records as records_before
    from (
        select outbox.number, outbox.records, outbox.to_topic, outbox.to_partition, outbox.key,
               outbox.value, outbox.header_names, outbox.header_values, outbox.timestamp_ms,
               outbox.written_at, outbox.copies_as
        from sideline.outbox
        where outbox.pipeline = progress.pipeline
          and outbox.topic = progress.topic
          and outbox.partition = progress.partition
          -- No row stands for more records.
          and outbox.number > progress.outbox_sent - %(largest)s
          and outbox.number + outbox.records > progress.outbox_sent + 1
          and outbox.number <= coalesce(%(until)s::bigint, progress.outbox_last)
        order by outbox.number
        limit %(limit)s
    ) as first
) as next on next.bytes_before < %(bytes)s and next.records_before < %(limit)s
where progress.pipeline = %(pipeline)s
  and progress.topic = %(topic)s
  and progress.partition = %(partition)s
  and progress.lease = %(lease)s::bigint[]
  and progress.owner = %(owner)s
order by next.number

-- name: read_references
-- What a row of the outbox refers to, from a place of it on, as many as fit into so many bytes and
-- one at least. An event that is no longer in the ledger has nothing to say: its key is left.
select given.number, outbox.copies_topic, given.partition, given."offset", given.incarnation,
       events.pipeline is null or events.erased_at is not null as gone,
       events.timestamp_ms, events.key, events.value, events.header_names, events.header_values,
       events.attempts, (extract(epoch from events.parked_at) * 1000)::bigint as first_ms,
       (extract(epoch from events.due_at) * 1000)::bigint as due_ms,
       events.error, events.message, events.stage, events.traceback,
       sum(coalesce(octet_length(events.value), 0)) over (order by given.number)
           - coalesce(octet_length(events.value), 0) as before
from sideline.outbox
cross join lateral unnest(
    outbox.copies_partitions, outbox.copies_offsets, outbox.copies_incarnations
) with ordinality as given (partition, "offset", incarnation, number)
left join lateral (
    -- A look for each, whatever the statistics say: those of a young table say nothing.
    select *
    from sideline.events
    where events.pipeline = outbox.pipeline
      and events.topic = outbox.copies_topic
      and events.partition = given.partition
      and events."offset" = given."offset"
      and events.incarnation = given.incarnation
    limit 1
) as events on true
where outbox.pipeline = %(pipeline)s
  and outbox.topic = %(topic)s
  and outbox.partition = %(partition)s
  and outbox.number = %(number)s
  and given.number between %(first)s and %(last)s
order by given.number

-- name: known_outbox
-- Whether Kafka's last word about a partition is about this outbox: the row with that number is the
-- one that was sent. A database that was restored counts its numbers anew.
select exists (
    select
    from sideline.outbox
    where outbox.pipeline = %(pipeline)s
      and outbox.topic = %(topic)s
      and outbox.partition = %(partition)s
      and outbox.number > %(number)s - %(largest)s
      and outbox.number <= %(number)s
      and outbox.number + outbox.records > %(number)s
      and (extract(epoch from outbox.written_at) * 1000000)::bigint = %(stamp)s
)

-- name: owns_partition
-- Whether lease and owner still hold.
select
from sideline.progress
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s

-- name: mark_outbox
-- Kafka has everything up to a number: always a beginning of what is left, and only by the owner.
-- Nobody waits for the disk: should a server lose the mark, Kafka's own word makes it again (K24).
-- Where a mark brings news that only the sender has, it is as durable as any other transaction.
with marked as (
    update sideline.progress
    set outbox_sent = %(number)s,
        outbox_trouble = null
    where pipeline = %(pipeline)s
      and topic = %(topic)s
      and partition = %(partition)s
      and lease = %(lease)s::bigint[]
      and owner = %(owner)s
      and %(number)s between outbox_sent and outbox_last
    returning pipeline, topic, partition, ctid::text as place, outbox_sent, outbox_last
),
gone as (
    delete from sideline.outbox
    using marked
    where outbox.pipeline = marked.pipeline
      and outbox.topic = marked.topic
      and outbox.partition = marked.partition
      -- One that stands for some that are not sent yet stays.
      and outbox.number + outbox.records - 1 <= %(number)s
),
waits as (
    select set_config(
        'synchronous_commit',
        case when %(news)s then current_setting('synchronous_commit') else 'off' end,
        true
    )
)
select marked.place, marked.outbox_sent, marked.outbox_last
from marked
cross join waits

-- name: place_copies
-- Where Kafka put the bytes of stashed events. Before their rows leave the outbox.
update sideline.events
set copy_partition = given.partition,
    copy_offset = given."offset"
from unnest(%(numbers)s::bigint[], %(partitions)s::integer[], %(offsets)s::bigint[])
    as given (number, partition, "offset")
cross join lateral (
    select *
    from sideline.outbox
    where outbox.pipeline = %(pipeline)s
      and outbox.topic = %(topic)s
      and outbox.partition = %(partition)s
      and outbox.number = given.number
      and outbox.value is not null
    limit 1
) as outbox
cross join lateral (
    select stashed.ctid as place
    from sideline.events as stashed
    where stashed.pipeline = outbox.pipeline
      and stashed.topic = outbox.of_topic
      and stashed.partition = outbox.of_partition
      and stashed."offset" = outbox.of_offset
      and stashed.incarnation >= 0
      and stashed.held_in = 'stash'
      and stashed.copy_offset is null
    order by stashed.incarnation desc
    limit 1
) as found
where events.ctid = found.place

-- name: pointed_at
-- What tells whether the record at an event's place is still the event: its topic may have been made
-- again since. Of imported ones neither key nor time is known, only that they are older than that.
select given.number, events.key, events.timestamp_ms,
       (extract(epoch from events.parked_at) * 1000)::bigint,
       events.imported_from is not null, progress.incarnation
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[]
) with ordinality as given (topic, partition, "offset", incarnation, number)
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = given.topic
 and events.partition = given.partition
 and events."offset" = given."offset"
 and events.incarnation = given.incarnation
left join sideline.progress
  on progress.pipeline = events.pipeline
 and progress.topic = events.topic
 and progress.partition = events.partition

-- name: stashed_places
-- Where the bytes of stashed events are: in the outbox, or at a place of the stash topic.
select given.number, events.copy_partition, events.copy_offset,
       outbox.number is not null as unsent,
       outbox.key, outbox.value, outbox.header_names, outbox.header_values
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[]
) with ordinality as given (topic, partition, "offset", incarnation, number)
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.topic = given.topic
 and events.partition = given.partition
 and events."offset" = given."offset"
 and events.incarnation = given.incarnation
left join lateral (
    select *
    from sideline.outbox
    where outbox.pipeline = events.pipeline
      and outbox.of_topic = events.topic
      and outbox.of_partition = events.partition
      and outbox.of_offset = events."offset"
      and outbox.value is not null
    order by outbox.number desc
    limit 1
) as outbox on true

-- name: remember_copies
-- Where stashed events were found by looking through their topic.
update sideline.events
set copy_partition = given.copy_partition,
    copy_offset = given.copy_offset
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[], %(copy_partitions)s::integer[], %(copy_offsets)s::bigint[]
) as given (topic, partition, "offset", incarnation, copy_partition, copy_offset)
where events.pipeline = %(pipeline)s
  and events.topic = given.topic
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation

-- name: oldest_pointers
-- The oldest event of each partition whose bytes are still in the source topic only.
select topic, partition, min("offset"), min(timestamp_ms) filter (where timestamp_ms >= 0),
       count(*), (array_agg(state order by "offset"))[1]
from sideline.events
where pipeline = %(pipeline)s
  and state in ('parked', 'dead')
  and held_in = 'source'
group by topic, partition

-- name: purge_counts
-- Copies of events that are over, by the topic that they are in.
select copies.topic, count(*)
from sideline.events
join lateral (
    select case
               when events.held_in = 'stash' then pipelines.stashes ->> events.topic
               when events.copy_topic = any (
                   array(select value from jsonb_each_text(pipelines.dead_letters))
               ) then events.copy_topic
           end as topic
    from sideline.pipelines
    where pipelines.name = events.pipeline
) as copies on copies.topic is not null
where events.pipeline = %(pipeline)s
  and events.state in ('resolved', 'discarded')
  and events.incarnation >= 0
  and events.purged_at is null
  and events.parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and events.parked_at < coalesce(%(until)s::timestamptz, 'infinity')
  and (
      %(release)s::bigint is null
      or exists (
          select
          from sideline.operation_items as items
          join sideline.operations on operations.id = items.operation
          where items.operation = %(release)s
            and items.topic = events.topic
            and events.updated_at >= operations.created_at
            and events.updated_at <= coalesce(operations.ended_at, 'infinity')
            and (
                items.queue = events.former_queue
                or (
                    items.partition = events.partition
                    and items."offset" = events."offset"
                    and items.incarnation = events.incarnation
                )
            )
      )
  )
group by copies.topic
order by copies.topic

-- name: purge_open
-- Events of the same choice that are not over: their copies stay.
select count(*)
from sideline.events
join lateral (
    select case
               when events.held_in = 'stash' then pipelines.stashes ->> events.topic
               when events.copy_topic = any (
                   array(select value from jsonb_each_text(pipelines.dead_letters))
               ) then events.copy_topic
           end as topic
    from sideline.pipelines
    where pipelines.name = events.pipeline
) as copies on copies.topic is not null
where events.pipeline = %(pipeline)s
  and events.state in ('parked', 'retrying', 'dead', 'pending')
  and events.incarnation >= 0
  and events.purged_at is null
  and events.parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and events.parked_at < coalesce(%(until)s::timestamptz, 'infinity')
  and (
      %(release)s::bigint is null
      or exists (
          select
          from sideline.operation_items as items
          join sideline.operations on operations.id = items.operation
          where items.operation = %(release)s
            and items.topic = events.topic
            and events.updated_at >= operations.created_at
            and events.updated_at <= coalesce(operations.ended_at, 'infinity')
            and (
                items.queue = events.former_queue
                or (
                    items.partition = events.partition
                    and items."offset" = events."offset"
                    and items.incarnation = events.incarnation
                )
            )
      )
  )

-- name: purgeable
-- The next of those that are over. Whoever purges at the same time takes others.
select events.topic, events.partition, events."offset", events.incarnation, events.key,
       events.state, copies.topic
from sideline.events
join lateral (
    select case
               when events.held_in = 'stash' then pipelines.stashes ->> events.topic
               when events.copy_topic = any (
                   array(select value from jsonb_each_text(pipelines.dead_letters))
               ) then events.copy_topic
           end as topic
    from sideline.pipelines
    where pipelines.name = events.pipeline
) as copies on copies.topic = any(%(topics)s::text[])
where events.pipeline = %(pipeline)s
  and events.state in ('resolved', 'discarded')
  -- Nobody could write to the outbox of a partition that is gone.
  and exists (
      select
      from sideline.progress
      where progress.pipeline = events.pipeline
        and progress.topic = events.topic
        and progress.partition = events.partition
  )
  and events.incarnation >= 0
  and events.purged_at is null
  and events.parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and events.parked_at < coalesce(%(until)s::timestamptz, 'infinity')
  and (
      %(release)s::bigint is null
      or exists (
          select
          from sideline.operation_items as items
          join sideline.operations on operations.id = items.operation
          where items.operation = %(release)s
            and items.topic = events.topic
            and events.updated_at >= operations.created_at
            and events.updated_at <= coalesce(operations.ended_at, 'infinity')
            and (
                items.queue = events.former_queue
                or (
                    items.partition = events.partition
                    and items."offset" = events."offset"
                    and items.incarnation = events.incarnation
                )
            )
      )
  )
order by events.parked_at, events.place
limit %(limit)s
for no key update of events skip locked

-- name: unsent_letters
-- Records that leave from retry topics' partitions and are not sent yet: dead letters among them, of
-- events whose tombstones leave from elsewhere.
select coalesce(sum(progress.outbox_last - progress.outbox_sent), 0)::bigint
from sideline.progress
join sideline.retry_topics
  on retry_topics.pipeline = progress.pipeline
 and retry_topics.topic = progress.topic
where progress.pipeline = %(pipeline)s

-- name: mark_purged
-- Their tombstones are in the outbox. What was in the stash alone is gone for good.
update sideline.events
set purged_at = now(),
    erased_at = case when events.held_in = 'stash' then now() else events.erased_at end,
    former = case when events.held_in <> 'stash' then events.former end
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[]
) as given (topic, partition, "offset", incarnation)
where events.pipeline = %(pipeline)s
  and events.topic = given.topic
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation

-- name: purge_source
-- Damaged events: given up by a person, or dead. Whether they are their key's last, Kafka knows.
select events.topic, events.partition, events."offset", events.incarnation, events.key,
       events.state
from sideline.events
join sideline.progress
  on progress.pipeline = events.pipeline
 and progress.topic = events.topic
 and progress.partition = events.partition
 and progress.incarnation = events.incarnation
where events.pipeline = %(pipeline)s
  and events.state in ('discarded', 'dead')
  and events.source_purged_at is null
  and events.incarnation >= 0
  and events.parked_at >= coalesce(%(since)s::timestamptz, '-infinity')
  and events.parked_at < coalesce(%(until)s::timestamptz, 'infinity')
  and (
      %(release)s::bigint is null
      or exists (
          select
          from sideline.operation_items as items
          join sideline.operations on operations.id = items.operation
          where items.operation = %(release)s
            and items.topic = events.topic
            and events.updated_at >= operations.created_at
            and events.updated_at <= coalesce(operations.ended_at, 'infinity')
            and (
                items.queue = events.former_queue
                or (
                    items.partition = events.partition
                    and items."offset" = events."offset"
                    and items.incarnation = events.incarnation
                )
            )
      )
  )
order by events.topic, events.partition, events."offset"

-- name: mark_source_purged
-- A tombstone took their place at their source.
update sideline.events
set source_purged_at = now()
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[]
) as given (topic, partition, "offset", incarnation)
where events.pipeline = %(pipeline)s
  and events.topic = given.topic
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation

-- name: release_known
-- Whose release it is.
select pipeline
from sideline.operations
where id = %(release)s

-- name: trouble_outbox
-- Why the next record of a partition waits.
update sideline.progress
set outbox_trouble = %(trouble)s
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
returning ctid::text

-- name: oldest_outbox
-- What is unsent of a pipeline: by partition, how many and since when.
select progress.topic, progress.partition, progress.outbox_last - progress.outbox_sent as records,
       oldest.written_at as since, oldest.to_topic, progress.outbox_trouble as trouble
from sideline.progress
left join lateral (
    select outbox.written_at, outbox.to_topic
    from sideline.outbox
    where outbox.pipeline = progress.pipeline
      and outbox.topic = progress.topic
      and outbox.partition = progress.partition
    order by outbox.number
    limit 1
) as oldest on true
where progress.pipeline = %(pipeline)s
  and progress.outbox_last > progress.outbox_sent
order by progress.topic, progress.partition

-- Events that leave as copies

-- name: keep_copied
-- Events that failed and whose copies leave with this transaction, exactly as they came.
insert into sideline.events (
    pipeline, topic, partition, incarnation, handler_version, why, state, "offset",
    key, value, header_names, header_values, timestamp_ms,
    stage, error, message, traceback, fingerprint, attempts, copy_topic, due_at,
    becomes, pending_topic, pending_partition, fresh
)
select %(pipeline)s, %(topic)s, %(partition)s, %(incarnation)s, %(version)s, 'failed',
       case when %(fresh)s then 'pending' else given.state end, given."offset", given.key, given.value, given.header_names::text[],
       given.header_values::bytea[], given.timestamp_ms, given.stage, given.error, given.message,
       given.traceback, given.fingerprint, given.attempts, given.copy_topic,
       now() + given.delay_ms * interval '1 millisecond',
       case when %(fresh)s then given.state end, %(pending_topic)s, %(pending_partition)s, %(fresh)s
from unnest(
    %(states)s::text[], %(offsets)s::bigint[], %(keys)s::bytea[], %(values)s::bytea[],
    %(header_names)s::text[], %(header_values)s::text[], %(timestamps)s::bigint[],
    %(stages)s::text[], %(errors)s::text[], %(messages)s::text[], %(tracebacks)s::text[],
    %(fingerprints)s::text[], %(attempts)s::integer[], %(copy_topics)s::text[],
    %(delays)s::bigint[]
) as given (
    state, "offset", key, value, header_names, header_values, timestamp_ms,
    stage, error, message, traceback, fingerprint, attempts, copy_topic, delay_ms
)

-- name: find_copied
-- The events that copies in a retry topic stand for, while it is their turn; by the copy's place.
-- Of one that a slice names which is not applied yet, nobody knows whether it is its turn (K22).
select given.number - 1, events.incarnation, events.timestamp_ms, events.key, events.value,
       events.header_names, events.header_values,
       (extract(epoch from events.parked_at) * 1000)::bigint, events.state = 'pending'
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[], %(attempts)s::integer[]
) with ordinality as given (topic, partition, "offset", incarnation, attempts, number)
cross join lateral (
    -- A look for each, whatever the statistics say: those of a young table say nothing.
    select *
    from sideline.events
    where events.pipeline = %(pipeline)s
      and events.topic = given.topic
      and events.partition = given.partition
      and events."offset" = given."offset"
      and events.incarnation = given.incarnation
    limit 1
) as events
where events.state = 'pending'
   or events.state = 'retrying'
  and events.attempts = given.attempts
  and events.copy_topic = %(copy_topic)s

-- name: hold_origins
-- The partitions whose books a slice of copies changes: before anything else, in a fixed order.
select
from sideline.progress
where pipeline = %(pipeline)s
  and (topic, partition) in (select * from unnest(%(topics)s::text[], %(partitions)s::integer[]))
order by topic, partition
for no key update

-- name: claim_copied
-- Those of some events whose turn it still is; nobody else moves them until this transaction ends.
select given.number - 1
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[], %(attempts)s::integer[]
) with ordinality as given (topic, partition, "offset", incarnation, attempts, number)
cross join lateral (
    select events.state, events.attempts, events.copy_topic
    from sideline.events
    where events.pipeline = %(pipeline)s
      and events.topic = given.topic
      and events.partition = given.partition
      and events."offset" = given."offset"
      and events.incarnation = given.incarnation
    limit 1
    for update
) as claimed
where claimed.state = 'retrying'
  and claimed.attempts = given.attempts
  and claimed.copy_topic = %(copy_topic)s

-- name: claim_for_good
-- Before events are handled that cannot be taken back: the copies that bring them their turn. It is
-- the place of a copy that claims, so that it may claim again after a death, and no other can.
update sideline.events
set copy_partition = %(copy_partition)s,
    copy_offset = given.copy_offset
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[], %(attempts)s::integer[], %(copy_offsets)s::bigint[]
) with ordinality as given (
    topic, partition, "offset", incarnation, attempts, copy_offset, number
)
cross join lateral (
    -- The claim holds them, so that they stay where they are.
    select claimed.ctid as place, claimed.state, claimed.attempts, claimed.copy_topic,
           claimed.copy_partition, claimed.copy_offset
    from sideline.events as claimed
    where claimed.pipeline = %(pipeline)s
      and claimed.topic = given.topic
      and claimed.partition = given.partition
      and claimed."offset" = given."offset"
      and claimed.incarnation = given.incarnation
    limit 1
) as found
-- Of the table itself nothing else is asked: by its state the planner might look through all that
-- wait.
where events.ctid = found.place
  and found.state = 'retrying'
  and found.attempts = given.attempts
  and found.copy_topic = %(copy_topic)s
  and (
      found.copy_offset is null
      or (found.copy_partition, found.copy_offset) = (%(copy_partition)s, given.copy_offset)
  )
returning given.number - 1

-- name: resolve_copied
-- Claimed events that were applied leave the table of those that wait: half the price of staying,
-- and their bytes are not kept. How many.
with gone as (
    delete from sideline.events
    using unnest(
        %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
        %(incarnations)s::integer[], %(attempts)s::integer[]
    ) as given (topic, partition, "offset", incarnation, attempts)
    cross join lateral (
        -- The claim holds them, so that they stay where they are.
        select claimed.ctid as place, claimed.state, claimed.held_in, claimed.imported_from
        from sideline.events as claimed
        where claimed.pipeline = %(pipeline)s
          and claimed.topic = given.topic
          and claimed.partition = given.partition
          and claimed."offset" = given."offset"
          and claimed.incarnation = given.incarnation
        limit 1
    ) as found
    where events.ctid = found.place
      and found.state = 'retrying'
      -- Without its row nobody could take a copy out of its topic, or know that it was imported.
      and found.held_in <> 'stash'
      and found.imported_from is null
    returning events.topic, events.partition, events."offset", events.incarnation, events.place,
              events.former_queue, events.why, events.stage, events.error, events.fingerprint,
              events.handler_version, events.timestamp_ms, given.attempts, events.generation,
              events.parked_at
),
moved as (
    insert into sideline.resolved (
        pipeline, topic, partition, "offset", incarnation, place, queue, why, stage, error,
        fingerprint, handler_version, timestamp_ms, attempts, generation, parked_at
    )
    select %(pipeline)s, topic, partition, "offset", incarnation, place, former_queue, why, stage,
           error, fingerprint, handler_version, timestamp_ms, attempts, generation, parked_at
    from gone
)
select count(*)
from gone

-- name: settle_copied
-- What became of claimed events.
update sideline.events
set state = given.state,
    attempts = given.attempts,
    copy_topic = given.copy_topic,
    copy_partition = null,
    copy_offset = null,
    due_at = now() + given.delay_ms * interval '1 millisecond',
    stage = coalesce(given.stage, events.stage),
    error = coalesce(given.error, events.error),
    message = coalesce(given.message, events.message),
    traceback = coalesce(given.traceback, events.traceback),
    fingerprint = coalesce(given.fingerprint, events.fingerprint),
    handler_version = %(version)s,
    updated_at = now()
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[], %(states)s::text[], %(attempts)s::integer[],
    %(copy_topics)s::text[], %(delays)s::bigint[], %(stages)s::text[], %(errors)s::text[],
    %(messages)s::text[], %(tracebacks)s::text[], %(fingerprints)s::text[]
) as given (
    topic, partition, "offset", incarnation, state, attempts, copy_topic, delay_ms, stage, error,
    message, traceback, fingerprint
)
cross join lateral (
    -- The claim holds them, so that they stay where they are.
    select claimed.ctid as place, claimed.state
    from sideline.events as claimed
    where claimed.pipeline = %(pipeline)s
      and claimed.topic = given.topic
      and claimed.partition = given.partition
      and claimed."offset" = given."offset"
      and claimed.incarnation = given.incarnation
    limit 1
) as found
where events.ctid = found.place
  and found.state = 'retrying'

-- name: balance_origins
-- The books of the partitions that copies came from.
update sideline.progress
set applied = progress.applied + given.applied,
    filtered = progress.filtered + given.filtered,
    dead = progress.dead + given.dead,
    duplicate = progress.duplicate + given.duplicate,
    retrying =
        progress.retrying - given.applied - given.filtered - given.dead - given.duplicate
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(applied)s::bigint[], %(filtered)s::bigint[],
    %(dead)s::bigint[], %(duplicate)s::bigint[]
) as given (topic, partition, applied, filtered, dead, duplicate)
where progress.pipeline = %(pipeline)s
  and progress.topic = given.topic
  and progress.partition = given.partition

-- name: late_copies
-- Events that wait in retry topics, and whose turn should have come long ago.
select topic, partition, "offset", incarnation, attempts, copy_topic
from sideline.events
where pipeline = %(pipeline)s
  and state = 'retrying'
  and copy_topic is not null
  and due_at < now() - %(late)s::interval
order by topic, partition, "offset", incarnation
limit %(most)s

-- name: resend_copied
-- Events of one partition whose copies are gone: they wait for others, or are dead.
update sideline.events
set state = case when given.new_topic is null then 'dead' else 'retrying' end,
    copy_topic = given.new_topic,
    copy_partition = null,
    copy_offset = null,
    due_at = now() + given.delay_ms * interval '1 millisecond',
    updated_at = now()
from unnest(
    %(offsets)s::bigint[], %(incarnations)s::integer[], %(attempts)s::integer[],
    %(copy_topics)s::text[], %(new_topics)s::text[], %(delays)s::bigint[]
) as given ("offset", incarnation, attempts, copy_topic, new_topic, delay_ms)
where events.pipeline = %(pipeline)s
  and events.topic = %(topic)s
  and events.partition = %(partition)s
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation
  and events.state = 'retrying'
  and events.attempts = given.attempts
  and events.copy_topic = given.copy_topic
returning events."offset", events.incarnation, events.copy_topic

-- name: note_tries
-- An event is tried again in place: how often it was, for whoever looks or comes after a crash.
update sideline.progress
set attempts = %(attempts)s,
    trouble = %(trouble)s,
    stuck_at = %(stuck_at)s,
    tries = %(tries)s,
    due_at = case when park_at is null then %(due_at)s else due_at end,
    updated_at = now()
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
returning ctid::text, park_at, park_reason

-- name: know_retry_topic
-- A retry topic of the pipeline's policy.
insert into sideline.retry_topics (pipeline, topic, source, number, delay_ms)
values (%(pipeline)s, %(topic)s, %(source)s, %(number)s, %(delay_ms)s)
on conflict (pipeline, topic) do update
set source = excluded.source,
    number = excluded.number,
    delay_ms = excluded.delay_ms

-- name: retry_topics
-- Every retry topic that a pipeline has or had.
select topic, source, number, delay_ms
from sideline.retry_topics
where pipeline = %(pipeline)s
order by source, number, topic

-- name: retrying_by_topic
-- How many events wait in each retry topic, and until when.
select copy_topic as topic, count(*) as events, min(due_at) as first_due_at,
       max(due_at) as last_due_at
from sideline.events
where pipeline = %(pipeline)s
  and state = 'retrying'
group by copy_topic
order by copy_topic

-- name: look_at_retry_topics
-- A driver begins: when the first copy of a retry topic is due is found out anew, because delays
-- may have changed.
update sideline.progress
set due_at = null
from sideline.retry_topics
where progress.pipeline = %(pipeline)s
  and retry_topics.pipeline = progress.pipeline
  and retry_topics.topic = progress.topic
  and progress.attempts = 0

-- Slices whose effects are records of Kafka

-- name: pend
-- What a slice changes once Kafka has committed it, written down before; its number is drawn here.
update sideline.progress
set slice_number = slice_number + 1,
    pending = %(pending)s::jsonb,
    pended_by = pg_current_xact_id(),
    pended_at = now(),
    aside = aside + %(aside)s,
    aside_version = aside_version + %(aside)s,
    updated_at = now()
where ctid = %(ctid)s::tid
  and pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and next_offset = %(start)s
  and pending is null
  -- Where the topic grew since the take, what was admitted was asked of this partition alone.
  and shared <= %(shared)s
returning ctid::text, slice_number, aside, aside_version

-- name: note_pending
-- What else the slice changes, known only after the fence.
update sideline.progress
set pending = %(pending)s::jsonb
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and pending is not null
returning ctid::text

-- name: look_pending
-- What the owner of a partition has to know of its last slice.
select next_offset, ctid::text, slice_number, applied_number, pending::text, aside, aside_version,
       shared
from sideline.progress
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s

-- name: apply_pending
-- Kafka has committed the slice: what it changes here is so. A person who accepted a loss
-- meanwhile has moved the partition elsewhere; there it stays.
update sideline.progress
set next_offset = case when next_offset = %(start)s then %(end)s else next_offset end,
    consumed = consumed + %(consumed)s,
    applied = applied + %(applied)s,
    filtered = filtered + %(filtered)s,
    skipped = skipped + %(skipped)s,
    parked = parked + %(parked)s,
    retrying = retrying + %(retrying)s,
    dead = dead + %(dead)s,
    duplicate = duplicate + %(duplicate)s,
    copies = copies + %(copies)s,
    guard = coalesce(%(guard)s::integer[], guard),
    event_at = coalesce(%(event_at)s, event_at),
    attempts = case when %(moves)s then 0 else attempts end,
    trouble = case when not %(moves)s then trouble end,
    stuck_at = case when not %(moves)s then stuck_at end,
    park_at = case when not %(moves)s or park_at >= %(end)s then park_at end,
    applied_number = slice_number,
    pending = null,
    updated_at = now()
where ctid = %(ctid)s::tid
  and pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and slice_number = %(number)s
  and applied_number = %(before)s
  and pending is not null
returning ctid::text, next_offset

-- name: drop_pending
-- Kafka has not committed the slice, and never will: nothing of it stays but its number.
update sideline.progress
set pending = null,
    updated_at = now()
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s
  and lease = %(lease)s::bigint[]
  and owner = %(owner)s
  and slice_number = %(number)s
  and applied_number = %(before)s
  and pending is not null
returning ctid::text

-- name: drop_claims
-- The message ids that the slice stored, by its transaction: those that were there before stay.
delete from sideline.message_ids
where stored_at = (
        select pended_at
        from sideline.progress
        where pipeline = %(pipeline)s
          and topic = %(topic)s
          and partition = %(partition)s
    )
  and xmin = (
        select pended_by::xid
        from sideline.progress
        where pipeline = %(pipeline)s
          and topic = %(topic)s
          and partition = %(partition)s
    )

-- name: lift_pending
-- The slice that named these events is decided.
update sideline.events
set state = becomes,
    becomes = null,
    pending_topic = null,
    pending_partition = null,
    fresh = false
where pipeline = %(pipeline)s
  and pending_topic = %(topic)s
  and pending_partition = %(partition)s
  and state = 'pending'

-- name: drop_fresh
-- The events that the slice wrote, and the queues that they were in.
delete from sideline.events
where pipeline = %(pipeline)s
  and pending_topic = %(topic)s
  and pending_partition = %(partition)s
  and state = 'pending'
  and fresh
returning queue

-- name: homes_of_queues
-- Where some queues are at home.
select home, count(*)
from sideline.queues
where id in (select unnest((select %(queues)s::bigint[])))
group by home
order by home

-- name: fewer_aside
-- Queues at home in a partition have ended without a replay.
update sideline.progress
set aside = aside - %(queues)s,
    aside_version = aside_version + 1
where pipeline = %(pipeline)s
  and topic = %(topic)s
  and partition = %(partition)s

-- name: uncount_dropped
-- Why events failed, of a slice that is dropped.
update sideline.causes
set parked = causes.parked - given.parked,
    skipped = causes.skipped - given.skipped,
    retried = causes.retried - given.retried,
    dead = causes.dead - given.dead
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(fingerprints)s::text[], %(parked)s::bigint[],
    %(skipped)s::bigint[], %(retried)s::bigint[], %(dead)s::bigint[]
) as given (topic, partition, fingerprint, parked, skipped, retried, dead)
where causes.pipeline = %(pipeline)s
  and causes.topic = given.topic
  and causes.partition = given.partition
  and causes.fingerprint = given.fingerprint

-- name: claim_replayed
-- Events that a replay is about to publish: only as they were read, and the caller counts them.
update sideline.events
set becomes = events.state,
    state = 'pending',
    pending_topic = %(topic)s,
    pending_partition = %(partition)s
from unnest(
    (select %(partitions)s::integer[]), (select %(offsets)s::bigint[]),
    (select %(incarnations)s::integer[]),
    (select %(generations)s::integer[]), (select %(states)s::text[]), (select %(queues)s::bigint[])
) as given (partition, "offset", incarnation, generation, state, queue)
where events.pipeline = %(pipeline)s
  and events.topic = %(topic)s
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation
  and events.generation = given.generation
  and events.state = given.state
  and events.queue is not distinct from given.queue

-- name: pend_copied
-- Events whose copies had their turn: what became of them is in the slice's pending changes.
update sideline.events
set becomes = events.state,
    state = 'pending',
    pending_topic = %(pending_topic)s,
    pending_partition = %(pending_partition)s
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(incarnations)s::integer[]
) as given (topic, partition, "offset", incarnation)
where events.pipeline = %(pipeline)s
  and events.topic = given.topic
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation = given.incarnation
  and events.state = 'retrying'

-- name: place_sent
-- Where Kafka put the bytes of stashed events.
update sideline.events
set copy_partition = given.copy_partition,
    copy_offset = given.copy_offset
from unnest(
    %(topics)s::text[], %(partitions)s::integer[], %(offsets)s::bigint[],
    %(copy_partitions)s::integer[], %(copy_offsets)s::bigint[]
) as given (topic, partition, "offset", copy_partition, copy_offset)
where events.pipeline = %(pipeline)s
  and events.topic = given.topic
  and events.partition = given.partition
  and events."offset" = given."offset"
  and events.incarnation >= 0
  and events.held_in = 'stash'
  and events.copy_offset is null
-- Messages: which were applied, and by which event.

-- name: pipeline_number
-- What stands for a pipeline's name.
select number
from sideline.pipelines
where name = %(pipeline)s

-- name: store_ids
-- The ids of a slice, all of them new; one that is there already refuses the statement.
insert into sideline.message_ids (id, "offset", pipeline, partition, incarnation, topic)
select unnest(%(ids)s::uuid[]), unnest(%(id_offsets)s::bigint[]), %(number)s, %(id_partition)s,
       %(incarnation)s, %(id_topic)s

-- name: store_ids_at_once
-- The same behind the fence of a slice that is one statement.
insert into sideline.message_ids (id, "offset", pipeline, partition, incarnation, topic)
select unnest(%(ids)s::uuid[]), unnest(%(id_offsets)s::bigint[]), %(number)s, %(id_partition)s::integer,
       %(incarnation)s::integer, %(id_topic)s
from fence

-- name: claim_ids
-- The same where some may be there: which of them could not be stored. In the order of the ids, so
-- that two slices never wait for each other.
with given as (
    select id, number, "offset", partition, incarnation, topic
    from unnest(
        %(ids)s::uuid[], %(offsets)s::bigint[], %(partitions)s::integer[],
        %(incarnations)s::integer[], %(topics)s::text[]
    ) with ordinality as given (id, "offset", partition, incarnation, topic, number)
),
claimed as (
    insert into sideline.message_ids (id, "offset", pipeline, partition, incarnation, topic)
    select id, "offset", %(number)s, partition, incarnation, topic
    from given
    order by id
    on conflict do nothing
    returning id
)
select given.number - 1
from given
left join claimed using (id)
where claimed.id is null

-- name: whose_ids
-- Which of some ids are stored, whether by the very event that brings them, and whether by a slice
-- of which it is not known if Kafka has it.
select given.number - 1,
       (message_ids.topic, message_ids.partition, message_ids."offset", message_ids.incarnation)
       = (given.topic, given.partition, given."offset", given.incarnation),
       message_ids.xmin in (
           select pended_by::xid from sideline.progress where pending is not null
       )
from unnest(
    %(ids)s::uuid[], %(offsets)s::bigint[], %(partitions)s::integer[],
    %(incarnations)s::integer[], %(topics)s::text[]
) with ordinality as given (id, "offset", partition, incarnation, topic, number)
join sideline.message_ids
  on message_ids.id = given.id
 and message_ids.pipeline = %(number)s

-- name: unclaim_ids
-- Ids of events that were not applied after all; only their own.
delete from sideline.message_ids
using unnest(
    %(ids)s::uuid[], %(offsets)s::bigint[], %(partitions)s::integer[],
    %(incarnations)s::integer[], %(topics)s::text[]
) as given (id, "offset", partition, incarnation, topic)
where message_ids.id = given.id
  and message_ids.pipeline = %(number)s
  and message_ids.topic = given.topic
  and message_ids.partition = given.partition
  and message_ids."offset" = given."offset"
  and message_ids.incarnation = given.incarnation
