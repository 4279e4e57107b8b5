"""What is measured, and how much of it."""

from __future__ import annotations

import dataclasses

SUITES = (
    "throughput",
    "dataframes",
    "prepare",
    "latency",
    "slow",
    "memory",
    "idle",
    "snapshot",
    "failures",
    "copies",
    "kafka",
    "planning",
    "replay",
    "publisher",
    "dedupe",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The size of a bench run. The defaults are those of the published figures."""

    events: int = 1_000_000
    partitions: tuple[int, ...] = (4, 8)
    keys: tuple[str, ...] = ("repeated", "distinct")
    rounds: int = 3
    only: tuple[str, ...] = SUITES
    peers: tuple[str, ...] = ()
    # Contestants of bench.optional that come on top.
    optional: tuple[str, ...] = ()
    minutes: float = 30.0
    quick: bool = False
    latency_partitions: tuple[int, ...] = (2, 8)
    latency_rates: tuple[int, ...] = (1_000, 10_000)
    # A JVM compiles for a while: everyone is warm when the first second counts.
    latency_warm_seconds: float = 15.0
    latency_seconds: float = 20.0
    # What a start leaves to do (JVM, compilers) is over by then.
    idle_warm_seconds: float = 20.0
    idle_seconds: float = 60.0
    slow_events: int = 100_000
    large_events: int = 60_000
    small_slices: int = 20_000
    parked_keys: int = 1_000_000
    outage_seconds: float = 30.0
    replayed_events: int = 100_000
    replayed_keys: int = 20_000
    # Slices of each kind that are measured in this process.
    slice_rounds: int = 5

    def scaled_down(self) -> Settings:
        """A run of a few minutes that shows that everything works, not how well."""
        return dataclasses.replace(
            self,
            events=min(self.events, 100_000),
            partitions=self.partitions[:1],
            rounds=1,
            minutes=min(self.minutes, 0.5),
            quick=True,
            latency_partitions=self.latency_partitions[:1],
            latency_rates=self.latency_rates[:1],
            latency_warm_seconds=3.0,
            latency_seconds=6.0,
            idle_warm_seconds=3.0,
            idle_seconds=5.0,
            slow_events=10_000,
            large_events=10_000,
            small_slices=2_000,
            parked_keys=20_000,
            outage_seconds=3.0,
            replayed_events=10_000,
            replayed_keys=2_000,
            slice_rounds=1,
        )
