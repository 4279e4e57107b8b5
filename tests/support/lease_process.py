"""Workers without Spark, in processes of their own that a test may kill, freeze and wake.

A nursery process imports everything once and forks a worker for each job, so that a worker costs
some milliseconds: hundreds of them can die in a test. A job is JSON: a pipeline, how to reach the
services, leases, and the crash point to arm. Reports come back through a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sideline.engine.lease import Lease, Report

STARTED, STOPPED, ENDED = "started", "stopped", "ended"
# Long enough for a loaded machine; nothing waits for it when all is well.
PATIENCE_SECONDS = 150.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker process is to do."""

    pipeline: dict[str, Any]
    """Arguments of `tests.support.handlers.build`."""
    database: str
    kafka: str
    leases: Sequence[Lease]
    attempt: int = 0
    crash_at: str | None = None
    grace_seconds: float = 10.0
    without: Sequence[str] = ()
    """Rules to break on purpose: see `tests.support.mutations`."""
    group: str | None = None
    """The file by which a process joins a control group."""
    cell: str | None = None
    """Keep careful workers in a process apart, as Spark's workers do: "forked" or "run"."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **dataclasses.asdict(self),
            "leases": [lease.as_dict() for lease in self.leases],
        }


class LeaseProcess:
    """One worker process, as a test sees it."""

    def __init__(self, nursery: Nursery, pid: int, output: Path) -> None:
        self._nursery = nursery
        self._output = output
        self.pid = pid

    def end(self) -> int:
        """Wait for its end: the exit code, negative for a signal."""
        return self._nursery.wait(self.pid, ENDED, self._said())

    def frozen(self) -> None:
        """Wait until it is stopped."""
        self._nursery.wait(self.pid, STOPPED, self._said())

    def ends(self) -> bool:
        """Wait until it has ended or is frozen: whether it has ended."""
        return ENDED in self._nursery.wait_for_any(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> int:
        """SIGKILL, whatever state it is in; its exit code if it had ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        return self.end()

    def reports(self) -> list[Report]:
        """What its leases came to, in their order; waits for its end."""
        code = self.end()
        assert code == 0, f"exit code {code}\n{self._said()}"
        lines = self._output.read_text().splitlines()
        return [Report.from_dict(json.loads(line)) for line in lines]

    def _said(self) -> str:
        errors = self._output.with_suffix(".err")
        return errors.read_text() if errors.exists() else ""


class Nursery:
    """Starts worker processes quickly."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._changed = threading.Condition()
        self._states: dict[int, dict[str, int]] = {}
        self._started: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lease_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def start(self, job: Job) -> LeaseProcess:
        """Fork a worker."""
        self._number += 1
        output = self._directory / f"{self._number}.out"
        line = json.dumps({"output": str(output), **job.as_dict()}).encode()
        stdin = self._process.stdin
        assert stdin is not None
        with self._changed:
            before = len(self._started)
            stdin.write(line + b"\n")
            stdin.flush()
            ok = self._changed.wait_for(lambda: len(self._started) > before, PATIENCE_SECONDS)
            assert ok, "the nursery does not answer"
            return LeaseProcess(self, self._started[-1], output)

    def wait(self, pid: int, state: str, said: str = "") -> int:
        """Wait until a worker has got into a state; its exit code or signal."""
        with self._changed:
            ok = self._changed.wait_for(
                lambda: {state, ENDED} & self._states[pid].keys(), PATIENCE_SECONDS
            )
            assert ok, f"worker {pid} is not {state}\n{said}"
            assert state in self._states[pid], f"worker {pid} ended: {self._states[pid]}\n{said}"
            return self._states[pid][state]

    def wait_for_any(self, pid: int) -> set[str]:
        """Wait until a worker has stopped or ended; which of them."""
        with self._changed:
            ok = self._changed.wait_for(lambda: self._states[pid], PATIENCE_SECONDS)
            assert ok, f"worker {pid} goes on and on"
            return set(self._states[pid])

    def close(self) -> None:
        """Kill what still runs, and end."""
        with self._changed:
            alive = [pid for pid, states in self._states.items() if ENDED not in states]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, pid, value = json.loads(line)
            with self._changed:
                if name == STARTED:
                    self._states[pid] = {}
                    self._started.append(pid)
                else:
                    self._states[pid][name] = value
                self._changed.notify_all()


# Inside the nursery


def _serve() -> None:
    """Fork for each line of stdin; say what becomes of the children."""
    import sideline.engine.care  # noqa: F401 - imported once, for all
    import tests.support.deadly
    import tests.support.hostile
    import tests.support.mutations
    import tests.support.poison  # noqa: F401

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffered = b""
    while True:
        ready, _, _ = select.select([0, read_end], [], [])
        if read_end in ready:
            os.read(read_end, 4096)
            _reap()
        if 0 in ready:
            read = os.read(0, 1 << 20)
            if not read:
                return
            *lines, buffered = (buffered + read).split(b"\n")
            for line in lines:
                _fork(json.loads(line), (read_end, write_end))


def _fork(job: dict[str, Any], pipes: tuple[int, int]) -> None:
    pid = os.fork()
    if pid:
        _say(STARTED, pid, 0)
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in pipes:
            os.close(number)
        errors = os.open(f"{job['output'][:-4]}.err", os.O_WRONLY | os.O_CREAT)
        nothing = os.open(os.devnull, os.O_RDWR)
        for target, source in ((0, nothing), (1, errors), (2, errors)):
            os.dup2(source, target)
        _work(job)
        code = 0
    except BaseException:  # noqa: BLE001 - the last chance to say what happened
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if not pid:
            return
        if os.WIFSTOPPED(status):
            _say(STOPPED, pid, os.WSTOPSIG(status))
        else:
            _say(ENDED, pid, os.waitstatus_to_exitcode(status))


def _say(name: str, pid: int, value: int) -> None:
    os.write(1, json.dumps([name, pid, value]).encode() + b"\n")


def _work(job: dict[str, Any]) -> None:
    """In the child: hold the leases one after the other."""
    import logging

    from sideline import Pipeline, crashpoints
    from sideline.engine import cell
    from sideline.engine.care import Keeper
    from sideline.engine.worker import Access, Worker
    from tests.support import deadly, mutations

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    mutations.break_rules(job["without"])
    if job["group"]:
        Path(job["group"]).write_text(str(os.getpid()))
    crashpoints.arm(job["crash_at"])
    access = Access(job["database"], {"bootstrap.servers": job["kafka"]})
    grace = job["grace_seconds"]

    def load() -> Pipeline:
        return deadly.handlers.build(**job["pipeline"])

    worker: Worker | Keeper | cell.Cell
    if job["cell"]:
        from sideline.engine.jobs import ship

        if job["cell"] == "forked":
            cell.open_nursery()
        worker = cell.Cell(cell.Charge(ship(load()), access, tuple(sys.path)))
    elif any(share["care"] for lease in job["leases"] for share in lease["shares"]):
        worker = Keeper(access, load, grace_seconds=grace)
    else:
        worker = Worker(load(), access, grace_seconds=grace)
    with Path(job["output"]).open("a", encoding="utf-8") as output:
        for data in job["leases"]:
            lease = Lease.from_dict(data)
            report = worker.work(lease, job["attempt"])
            output.write(json.dumps(report.as_dict()) + "\n")
            output.flush()
    worker.close()


if __name__ == "__main__":
    _serve()
