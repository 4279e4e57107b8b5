"""CPU seconds of process trees, from /proc."""

from __future__ import annotations

import dataclasses

import psutil


@dataclasses.dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds by who used them."""

    contestant: float
    postgres: float
    broker: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.contestant + self.postgres + self.broker

    def since(self, before: Cpu) -> Cpu:
        """What was used between ``before`` and now."""
        return Cpu(
            self.contestant - before.contestant,
            self.postgres - before.postgres,
            self.broker - before.broker,
        )

    def per(self, millions: float) -> Cpu:
        """Seconds per million events."""
        return Cpu(self.contestant / millions, self.postgres / millions, self.broker / millions)


def tree(pid: int) -> list[psutil.Process]:
    """The process and all its descendants that are alive."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def seconds(pid: int) -> float:
    """CPU seconds of a tree, those of children that have ended and were waited for included."""
    total = 0.0
    for process in tree(pid):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            # Ended between listing and reading: its parent's count has it now, or soon.
            continue
    return total


def listener(port: int) -> int | None:
    """The process that listens on a loopback port, if it is one that we can see."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            pid: int | None = connection.pid
            return pid
    return None
