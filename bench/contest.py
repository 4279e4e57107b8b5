"""One run of one contestant: start it, follow its commits, measure, end it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

import psycopg
from confluent_kafka import Consumer, KafkaException, TopicPartition

from bench import figures, packages
from bench.cpu import Cpu
from bench.peers import TASK_VARIABLE, Peer, Task
from bench.services import Services
from sideline.stack.java import find_java

ROOT = Path(__file__).parent.parent
# No contestant needs longer between two commits, the start of a JVM included.
PATIENCE_SECONDS = 180.0
_STOP_SECONDS = 20.0
# Of the contestants whose commits are read from outside; a commit takes at least ten times as long.
_LOOK_SECONDS = {"progress": 0.01, "offsets": 0.02}
_ANSWER_SECONDS = 5.0


class ContestantFailedError(Exception):
    """A contestant ended or fell silent before its work was done."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one run showed; CPU and rate are those between the first and the last commit."""

    peer: str
    events: int
    seconds: float
    rate: float
    cpu: Cpu
    commits: list[tuple[float, int]] = dataclasses.field(repr=False)

    @property
    def cpu_per_million(self) -> Cpu:
        """CPU seconds per million events."""
        return self.cpu.per(self.events / 1e6)


@dataclasses.dataclass(slots=True)
class Contestant:
    """A contestant that is running."""

    peer: Peer
    task: Task
    process: subprocess.Popen[bytes]
    log: Path

    def commits(self) -> Iterator[tuple[float, int]]:
        """(monotonic seconds, events committed so far), as it goes on."""
        if self.peer.commits == "reports":
            return _reports(self)
        look = _Offsets(self.task) if self.peer.commits == "offsets" else _Progress(self.task)
        return _seen(self, look, _LOOK_SECONDS[self.peer.commits])

    def failed(self, why: str) -> ContestantFailedError:
        """An error that shows the end of the contestant's log."""
        tail = self.log.read_text(errors="replace")[-2000:]
        return ContestantFailedError(f"{self.peer.name} {why}; the end of its log:\n{tail}")


@contextlib.contextmanager
def started(peer: Peer, task: Task) -> Iterator[Contestant]:
    """The contestant while it runs; whatever it started is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"bench-{peer.name}-") as directory:
        task = dataclasses.replace(task, workdir=directory)
        log = Path(directory, "log")
        with log.open("wb") as errors:
            process = subprocess.Popen(
                peer.command(task),
                cwd=ROOT,
                env=_environment(peer, task),
                stdout=subprocess.PIPE if peer.commits == "reports" else errors,
                stderr=errors,
                start_new_session=True,
            )
        try:
            yield Contestant(peer, task, process, log)
        finally:
            _end(process)


def drain(
    services: Services, peer: Peer, task: Task, progress: Callable[[int], None] = lambda _: None
) -> Run:
    """Let the contestant apply ``task.events`` events and measure it from commit to commit."""
    commits: list[tuple[float, int]] = []
    used: Cpu | None = None
    with started(peer, task) as contestant:
        for at, total in contestant.commits():
            commits.append((at, total))
            progress(total)
            if used is None:
                used = services.cpu(contestant.process.pid)
            if task.events is not None and total >= task.events:
                break
        assert used is not None
        used = services.cpu(contestant.process.pid).since(used)
    (begin, before), (end, after) = commits[0], commits[-1]
    if after == before:
        raise contestant.failed("committed everything at once: too few events to measure")
    rate = figures.steady_rate(commits)
    return Run(peer.name, after - before, end - begin, rate, used, commits)


def _environment(peer: Peer, task: Task) -> dict[str, str]:
    # Its own code, whichever tree the environment was installed from.
    own = [ROOT, ROOT / "src"]
    paths = [*own, packages.directory()] if peer.needs_packages else own
    return os.environ | {
        TASK_VARIABLE: task.dump(),
        "SIDELINE_KAFKA": task.bootstrap,
        "SIDELINE_DATABASE": task.database,
        "JAVA_HOME": str(find_java().home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }


def _reports(contestant: Contestant) -> Iterator[tuple[float, int]]:
    assert contestant.process.stdout is not None
    total = 0
    for line in _lines(contestant, contestant.process.stdout):
        at, _, events = line.partition(b" ")
        total += int(events)
        yield float(at), total
    raise contestant.failed("ended early")


def _lines(contestant: Contestant, stream: IO[bytes]) -> Iterator[bytes]:
    descriptor = stream.fileno()
    rest = b""
    while True:
        if not select.select([descriptor], [], [], PATIENCE_SECONDS)[0]:
            raise contestant.failed("fell silent")
        data = os.read(descriptor, 65_536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


class _Look(Protocol):
    """Sees from outside how far a contestant is."""

    def total(self) -> int:
        """Events that it has committed; 0 if that cannot be seen now."""

    def close(self) -> None:
        """End the connection, if there is one."""


def _seen(contestant: Contestant, look: _Look, pause: float) -> Iterator[tuple[float, int]]:
    seen, changed = 0, time.monotonic()
    with contextlib.closing(look):
        while True:
            # Ended is asked before the look: what it committed last is still seen.
            ended = contestant.process.poll() is not None
            total = look.total()
            now = time.monotonic()
            if total > seen:
                seen, changed = total, now
                yield now, total
            elif ended:
                raise contestant.failed("ended early")
            elif now - changed > PATIENCE_SECONDS:
                raise contestant.failed("fell silent")
            time.sleep(pause)


class _Progress:
    """Sees it in a database, also when that was away in between."""

    # What waits to be sent is not done yet. Copies are nobody's new events.
    _QUERY = """
        select coalesce(sum(next_offset - (outbox_last - outbox_sent)), 0)::int8
        from sideline.progress
        where topic not in (select topic from sideline.retry_topics)
    """

    def __init__(self, task: Task) -> None:
        self._database = task.database
        self._connection: psycopg.Connection[tuple[int]] | None = None

    def total(self) -> int:
        """Events that progress has passed."""
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._database, autocommit=True)
            row = self._connection.execute(self._QUERY).fetchone()
        except psycopg.errors.UndefinedTable:
            return 0
        except psycopg.OperationalError:
            self.close()
            return 0
        return row[0] if row else 0

    def close(self) -> None:
        """The next look connects again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Offsets:
    """Sees it in the offsets that a consumer group has committed, without being of the group."""

    def __init__(self, task: Task) -> None:
        self._spots = [TopicPartition(task.topic, number) for number in range(task.partitions)]
        self._consumer = Consumer(
            {
                "bootstrap.servers": task.bootstrap,
                "group.id": task.options["group"],
                # What it asks for is committed anyway. With the default it would be told to wait
                # while a transaction is open, and here the next one always is.
                "isolation.level": "read_uncommitted",
                "log_level": 3,
            }
        )

    def total(self) -> int:
        """Events before the group's offsets; topics are read from their beginning."""
        try:
            found = self._consumer.committed(self._spots, timeout=_ANSWER_SECONDS)
        except KafkaException:
            return 0
        # Negative: nothing is committed yet.
        return sum(max(0, spot.offset) for spot in found)

    def close(self) -> None:
        """End the connection."""
        self._consumer.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
            break
    # Whoever outlived the leader: a JVM, workers. The group is the contestant's alone.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
