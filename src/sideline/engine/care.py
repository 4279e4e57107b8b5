"""A lease with care: finds the event that ends its worker.

After a crash nobody knows which event it was. So the next lease of these partitions is worked by
a process of its own, one event at a time, which leaves a breadcrumb before each: the event in its
hand, in memory that its keeper sees too. The keeper waits beside it, learns how it died, and
begins again. Three deaths with the same event in hand, none of them from outside, and that event
fails without being tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import dataclasses
import faulthandler
import functools
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

import psycopg

from sideline.clock import Clock, SystemClock
from sideline.engine.deaths import ENOUGH, Death, oom_kills, telling
from sideline.engine.lease import Lease, Report
from sideline.engine.watchdog import LOOP_SECONDS, in_time
from sideline.engine.worker import Worker
from sideline.errors import HandlerTimeout, NonRecoverable, WorkerCrashed
from sideline.ledger.connection import connect
from sideline.ledger.sql import queries
from sideline.policies import Block
from sideline.sinks import Calls

if TYPE_CHECKING:
    from sideline.engine.worker import Access
    from sideline.events import Event
    from sideline.pipeline import Pipeline

# What a death costs is done again: little of it, but more than a transaction's worth.
SLICE_EVENTS = 100
# How often the keeper looks whether the worker still lives.
LOOK_SECONDS = 0.05
# So many deaths in one lease with nothing in hand (in setup, say), and the driver should know.
EMPTY_HANDED = 3
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.1, 3.0
# Whoever was found out is set aside in the same lease, however late it is: the next keeper would
# have to find it out again.
SENTENCE_SECONDS = 2.0
LAST_WORDS_BYTES = 100_000
_PR_SET_PDEATHSIG = 1
# How a partition's trouble begins that a keeper has written down.
_THE_WORKER = "the worker "

log = logging.getLogger(__name__)


class InHand(NamedTuple):
    """What a breadcrumb says."""

    share: int
    """Which share of the lease."""
    offset: int
    in_key: bool
    """Whether `key=` had it, and not the handler."""
    came_back: int = -1
    """Of an event that waited and was released: its partition, which may be another one."""


class Crumb:
    """The event in hand, in memory that a process shares with those it forks."""

    _FORM = struct.Struct("=qqqq")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.drop()

    def leave(self, share: int, offset: int, *, in_key: bool, came_back: int = -1) -> None:
        """Say what is in hand; it stays there when the process dies."""
        self._FORM.pack_into(self._memory, 0, share, offset, in_key, came_back)

    def drop(self) -> None:
        """Nothing is in hand."""
        self._FORM.pack_into(self._memory, 0, -1, 0, 0, -1)

    def read(self) -> InHand | None:
        """What is in hand."""
        share, offset, in_key, came_back = self._FORM.unpack_from(self._memory, 0)
        return None if share < 0 else InHand(share, offset, bool(in_key), came_back)


class Doom(NamedTuple):
    """An event that is not tried any more."""

    offset: int
    error: NonRecoverable
    in_key: bool = False
    fresh: bool = False
    """Whether it was found out in this lease."""


class Order(NamedTuple):
    """What the keeper tells its worker to do."""

    lease: Lease
    attempt: int
    doomed: dict[tuple[str, int], Doom]
    again: dict[tuple[str, int, int], NonRecoverable]
    """Released events that are not tried any more: topic, partition, offset."""


class Care:
    """What goes with every call of the user's functions."""

    def __init__(self, pipeline: Pipeline, crumb: Crumb) -> None:
        self._crumb = crumb
        self._blocks = isinstance(pipeline.on_failure, Block)
        self._shares: dict[tuple[str, int], int] = {}
        self._doomed: dict[tuple[str, int], Doom] = {}
        self._again: dict[tuple[str, int, int], NonRecoverable] = {}
        self._topics: dict[str, int] = {}
        # An outside call cannot be taken back: no more than one of them is made again.
        calls = isinstance(pipeline.sink, Calls)
        self._slice_size = 1 if calls else min(pipeline.slice_size, SLICE_EVENTS)
        self.pipeline = self._careful(pipeline)

    def begin(self, order: Order) -> None:
        """What is known at a lease's begin."""
        shares = order.lease.shares
        self._shares = {(share.topic, share.partition): place for place, share in enumerate(shares)}
        self._topics = {share.topic: place for place, share in enumerate(shares)}
        self._again = order.again
        # Blocking means trying again: once in each lease, for the code may be mended by now.
        self._doomed = {
            partition: doom
            for partition, doom in order.doomed.items()
            if doom.fresh or not self._blocks
        }
        self._set_slice_size()

    @contextlib.contextmanager
    def holding(self, event: Event, *, in_key: bool = False) -> Iterator[None]:
        """Have an event in hand; fail if it is doomed."""
        place = (event.topic, event.partition)
        if event.delivery.replayed:
            # Its queue may be at home elsewhere than where it was consumed.
            error = self._again.get((*place, event.offset))
            if error is not None:
                raise error.with_traceback(None)
            share = self._topics.get(event.topic, -1)
            self._crumb.leave(share, event.offset, in_key=in_key, came_back=event.partition)
        else:
            if self._doomed:
                self._judge(event, self._doomed.get(place), in_key=in_key)
            self._crumb.leave(self._shares.get(place, -1), event.offset, in_key=in_key)
        try:
            yield
        finally:
            self._crumb.drop()

    def _judge(self, event: Event, doom: Doom | None, *, in_key: bool) -> None:
        if doom is None:
            return
        if (doom.offset, doom.in_key) == (event.offset, in_key):
            raise doom.error.with_traceback(None)
        if doom.offset < event.offset:
            del self._doomed[event.topic, event.partition]
            self._set_slice_size()

    def _set_slice_size(self) -> None:
        # The ledger remembers one suspect a partition: a doomed event is committed before the
        # next one is tried, or two of them in one slice would be found for ever.
        self.pipeline.slice_size = 1 if self._doomed else self._slice_size

    def _careful(self, pipeline: Pipeline) -> Pipeline:
        one = copy.copy(pipeline)
        one.concurrency = 1
        one.handle = self._wrapped(pipeline.handle)
        if pipeline.is_async:
            one.handle = self._wrapped(_one_by_one(pipeline))
            if one.handler_timeout is not None:
                one.handler_timeout += LOOP_SECONDS
        if pipeline.key is not None:
            one.key = self._wrapped(pipeline.key, in_key=True)
        dedupe = pipeline.dedupe
        if dedupe is not None and dedupe.of is not None:
            one.dedupe = dataclasses.replace(dedupe, of=self._wrapped(dedupe.of))
        return one

    def _wrapped(self, function: Callable[..., Any], *, in_key: bool = False) -> Callable[..., Any]:
        @functools.wraps(function)
        def careful(event: Event, *transaction: Any) -> Any:  # noqa: ANN401 - the user's own
            with self.holding(event, in_key=in_key):
                return _whole(function(event, *transaction))

        return careful


def _one_by_one(pipeline: Pipeline) -> Callable[[Event], Any]:
    """A coroutine function as an ordinary one, in a loop that waits for it."""
    handler = pipeline.handle
    if pipeline.handler_timeout is not None:
        handler = in_time(handler, pipeline.handler_timeout)
    runner = asyncio.Runner()

    def handle(event: Event) -> Any:  # noqa: ANN401 - the user's own
        return runner.run(handler(event))

    return handle


def _whole(result: Any) -> Any:  # noqa: ANN401 - the user's own
    """A generator is still the user's code: run it while its event is in hand."""
    return tuple(result) if isinstance(result, Iterator) else result


class Life:
    """One worker process, as its keeper sees it."""

    def __init__(self, number: int, serve: Callable[[Connection, Life], NoReturn]) -> None:
        self.number = number
        self.crumb = Crumb()
        self.keeper = os.getpid()
        self.last_words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in the end
        self._oom_kills = oom_kills()
        self._connection, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            serve(theirs, self)
        theirs.close()

    def work(self, order: Order, abandoned: Callable[[], bool]) -> Report | Exception | Death:
        """Let it work; what it came to."""
        try:
            self._connection.send(order)
            while not self._connection.poll(LOOK_SECONDS):
                if abandoned():
                    os.kill(self.pid, signal.SIGKILL)
                    raise SystemExit
                # Its own children may keep the pipe open beyond its death.
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return self._died(status)
            answer: Report | Exception = self._connection.recv()
        except (EOFError, OSError):
            return self._died(os.waitpid(self.pid, 0)[1])
        return answer

    def end(self) -> None:
        """Let it end in an orderly way."""
        self.hang_up()
        os.waitpid(self.pid, 0)
        self.last_words.close()

    def hang_up(self) -> None:
        """Close the keeper's end."""
        self._connection.close()

    def _died(self, status: int) -> Death:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.hang_up()
        self.last_words.seek(0)
        words = telling(self.last_words.read(LAST_WORDS_BYTES).decode(errors="replace"))
        self.last_words.close()
        code = os.waitstatus_to_exitcode(status)
        return Death(code, oom_kills() > self._oom_kills, words)


class Keeper:
    """Works leases with care; the process around it must have no threads, for it forks."""

    def __init__(
        self,
        access: Access,
        load: Callable[[], Pipeline],
        clock: Clock | None = None,
        *,
        abandoned: Callable[[], bool] = lambda: False,
        **options: Any,  # noqa: ANN401 - the Worker's
    ) -> None:
        self._access = access
        self._load = load
        self._clock = clock or SystemClock()
        self._abandoned = abandoned
        """Whether nobody wants to know any more."""
        self._options = options
        self._life: Life | None = None
        self._lives = 0
        self._again: dict[tuple[str, int, int], NonRecoverable] = {}

    def work(self, lease: Lease, attempt: int = 0) -> Report:
        """Hold the lease's partitions as long as it lasts, with as many workers as it takes."""
        report = Report(lease.round, socket.gethostname(), os.getpid())
        try:
            doomed = self._known_suspects(lease)
            empty_handed = outside = 0
            while self._clock.now() < lease.ends_at and empty_handed < EMPTY_HANDED:
                life = self._life = self._life or self._begin()
                order = Order(
                    dataclasses.replace(lease, life=life.number), attempt, doomed, self._again
                )
                answer = life.work(order, self._abandoned)
                if isinstance(answer, Report):
                    self._forget_suspects(lease)
                    return answer
                if isinstance(answer, Exception):
                    raise answer
                self._life = None
                known = dict(doomed), dict(self._again)
                report.crash = self._bury(order, life, answer)
                if (doomed, self._again) != known:
                    late = max(lease.ends_at, self._clock.now() + SENTENCE_SECONDS)
                    lease = dataclasses.replace(lease, ends_at=late)
                if life.crumb.read() is None:
                    empty_handed += 1
                elif not answer.counts:
                    outside += 1
                self._pause(empty_handed + outside, lease)
        except psycopg.OperationalError as error:
            report.trouble = f"PostgreSQL: {str(error).strip()}"
        return report

    def close(self) -> None:
        """Let the worker end."""
        if self._life is not None:
            self._life.end()
            self._life = None

    # Lives

    def _begin(self) -> Life:
        self._lives += 1
        return Life(self._lives, self._serve)

    def _serve(self, connection: Connection, life: Life) -> NoReturn:
        """In the worker's process: do as ordered until the keeper hangs up."""
        code = 1
        try:
            life.hang_up()
            # A handler that ends its process group ends nobody else.
            os.setpgid(0, 0)
            die_with_parent(life.keeper)
            last_words = life.last_words.fileno()
            faulthandler.enable(last_words)
            pipeline = self._load()
            care = Care(pipeline, life.crumb)
            worker = Worker(care.pipeline, self._access, last_words=last_words, **self._options)
            # What wraps the handler is not part of it.
            worker.handler_version = pipeline.version
            with contextlib.suppress(EOFError):
                while True:
                    order: Order = connection.recv()
                    care.begin(order)
                    connection.send(_worked(worker, order))
            worker.close()
            code = 0
        except BaseException:  # noqa: BLE001 - the last chance to say what happened
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _pause(self, deaths: int, lease: Lease) -> None:
        """Whoever is killed again and again does not come back ever faster."""
        if deaths:
            wait = min(LAST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (deaths - 1))
            self._clock.sleep(max(0.0, min(wait, lease.ends_at - self._clock.now())))

    # The ledger

    def _known_suspects(self, lease: Lease) -> dict[tuple[str, int], Doom]:
        """What other keepers found out."""
        parameters = _named(lease) | {"enough": ENOUGH}
        with self._connect(lease) as connection:
            rows = connection.execute(queries()["suspects"], parameters).fetchall()
        return {
            (topic, number): Doom(offset, _remembered(trouble, deaths))
            for topic, number, offset, deaths, trouble in rows
            # Without the reason it is tried once more: the next death tells.
            if (trouble or "").startswith(_THE_WORKER)
        }

    def _forget_suspects(self, lease: Lease) -> None:
        """Those that were passed: their offsets may come again, as other events."""
        with self._connect(lease) as connection:
            connection.execute(queries()["forget_suspects"], _named(lease))

    def _bury(self, order: Order, life: Life, death: Death) -> str:
        """Free what a dead worker held, and count its death against the event in its hand."""
        lease, crumb = order.lease, life.crumb.read()
        fence = {"pipeline": lease.pipeline, "lease": list(lease.number(order.attempt))}
        words = f"{_THE_WORKER}{death}"
        if crumb is not None:
            words += f" with event {_place_of(lease, crumb)} in hand"
        log.warning("%s", words)
        with self._connect(lease) as connection:
            for (pid,) in connection.execute(queries()["dead_backends"], fence).fetchall():
                connection.execute(queries()["terminate"], {"pid": pid, "timeout_ms": 5_000})
            if crumb is not None and crumb.came_back >= 0:
                self._count_again(connection, lease, crumb, death)
            elif crumb is not None and death.counts:
                share = lease.shares[crumb.share]
                counted = {
                    "topic": share.topic,
                    "partition": share.partition,
                    "offset": crumb.offset,
                    "trouble": words,
                }
                row = connection.execute(queries()["count_death"], fence | counted).fetchone()
                if row is not None and row[0] >= ENOUGH:
                    doom = Doom(crumb.offset, death.error(row[0]), crumb.in_key, fresh=True)
                    order.doomed[share.of] = doom
            connection.execute(queries()["bury"], fence)
        return words

    def _count_again(
        self, connection: psycopg.Connection[Any], lease: Lease, crumb: InHand, death: Death
    ) -> None:
        """Progress has passed the event long ago, so its own row counts, for every keeper."""
        if not death.counts:
            return
        event = (lease.shares[crumb.share].topic, crumb.came_back, crumb.offset)
        topic, partition, offset = event
        named = {"topic": topic, "partition": partition, "offset": offset}
        rows = connection.execute(
            queries()["count_death_of_replayed"], named | {"pipeline": lease.pipeline}
        ).fetchall()
        deaths = max((row[0] for row in rows), default=0)
        if deaths >= ENOUGH:
            self._again[event] = death.error(deaths)

    def _connect(self, lease: Lease) -> psycopg.Connection[Any]:
        # Never open while a worker is forked.
        return connect(self._access.database, role=f"keeper {lease.pipeline}")


def _named(lease: Lease) -> dict[str, Any]:
    return {
        "pipeline": lease.pipeline,
        "topics": [share.topic for share in lease.shares],
        "partitions": [share.partition for share in lease.shares],
    }


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when that one ends, however it does."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _place_of(lease: Lease, crumb: InHand) -> str:
    share = lease.shares[crumb.share]
    where = share.of if crumb.came_back < 0 else f"{share.topic}/{crumb.came_back}"
    return f"{where}/{crumb.offset}"


def _worked(worker: Worker, order: Order) -> Report | Exception:
    try:
        return worker.work(order.lease, order.attempt)
    except Exception as error:  # noqa: BLE001 - raised again where the keeper was asked
        return error


def _remembered(trouble: str, deaths: int) -> NonRecoverable:
    """The error of an event that was found out elsewhere."""
    kind = HandlerTimeout if "handler_timeout" in trouble else WorkerCrashed
    return kind(f"{trouble}, {deaths} times.")
