"""Parked events that come back: against the same events live, beside others, and in a long tail."""

from __future__ import annotations

import statistics

from bench import beside, comeback
from bench.suites import Bench, Finding, Outcome

# The rate of a replay, of the same handler live.
AIM = 0.7
# The rate of live events while as many others come back, of what it is without.
LIVE_AIM = 0.8
# A key with a long tail goes in slices: what is held at once does not grow with the tail.
MEMORY_AIM_MB = 100.0
GROWTH_AIM = 1.5
SHORT = 5


def run(bench: Bench) -> Outcome:
    """Workers on a topic; slices alone, in turns with live ones; then one key."""
    settings = bench.settings
    events, keys = settings.replayed_events, settings.replayed_keys
    workers, slices = [], []
    with bench.narrator.bar("replay of many keys", settings.rounds) as done:
        for number in range(settings.rounds):
            workers.append(beside.measure(bench.services, events, keys))
            slices.append(comeback.measure(bench.services, events, keys))
            done(number + 1)
    with bench.narrator.bar("replay of one key", 2) as done:
        short = comeback.measure_tail(bench.services, events // SHORT)
        done(1)
        long = comeback.measure_tail(bench.services, events)
        done(2)
    live, back, company = (statistics.median(seconds) for seconds in zip(*workers, strict=True))
    ratio = statistics.median(one.live_seconds / one.replay_seconds for one in workers)
    bare = statistics.median(one.live_seconds / one.replay_seconds for one in slices)
    kept = statistics.median(one.live_seconds / one.live_beside_seconds for one in workers)
    grown, less = long.grown_bytes / 1e6, short.grown_bytes / 1e6
    many = f"{events:,} events of {keys:,} keys"
    rows = [
        {"what": f"{many}, live", "measured": f"{events / live:,.0f} events/s"},
        {"what": f"{many}, out of the ledger", "measured": f"{events / back:,.0f} events/s"},
        {
            "what": f"{many}, live, while as many come back",
            "measured": f"{events / company:,.0f} events/s",
        },
        {
            "what": "slices alone, without a topic: out of the ledger, of live",
            "measured": f"{bare:.2f} x",
        },
        {
            "what": f"one key with {events - 1:,} followers, out of the ledger",
            "measured": f"{events / long.seconds:,.0f} events/s, {grown:,.0f} MB more",
        },
        {
            "what": f"one key with {events // SHORT - 1:,} followers",
            "measured": f"{events / SHORT / short.seconds:,.0f} events/s, {less:,.0f} MB more",
        },
    ]
    findings = [
        Finding("replay, of the same handler live", ratio, AIM, unit="x"),
        Finding("live events during a large release", kept, LIVE_AIM, unit="x"),
        Finding("memory for a long tail", grown, MEMORY_AIM_MB, at_least=False, unit=" MB"),
        Finding(
            f"memory for a tail {SHORT} times as long",
            grown / max(less, 1.0),
            GROWTH_AIM,
            at_least=False,
            unit="x",
        ),
    ]
    return Outcome("replay", f"Replay: {events:,} parked events", rows, findings)
