"""The arithmetic of the report: medians, ratios, percentiles, growth. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, int(rank) - 1)]


def ratio_by_round(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of each round.

    Rounds are compared with themselves: a machine that is slow for a minute is slow for both.
    """
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """The slope of the least-squares line through (seconds, value), per minute."""
    if len({at for at, _ in samples}) < 2:
        return 0.0
    slope, _ = statistics.linear_regression([at for at, _ in samples], [v for _, v in samples])
    return slope * 60


def steady_rate(commits: Sequence[tuple[float, int]]) -> float:
    """Events per second between the first and the last commit.

    ``commits``: (seconds, events committed so far). What the first commit brought is not
    counted, because the time that it took is not either: start-up favours nobody.
    """
    (begin, before), (end, after) = commits[0], commits[-1]
    return (after - before) / (end - begin)


def interleave(names: Sequence[T], rounds: int) -> list[list[T]]:
    """The order of each round: everyone takes every place in turn."""
    count = len(names)
    return [[names[(turn + place) % count] for place in range(count)] for turn in range(rounds)]
