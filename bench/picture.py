"""A small picture of the results for the docs: plain SVG, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

from bench.suites import Outcome

WIDTH = 720
_LEFT, _BAR, _GAP = 250, 18, 8
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 }
  .note { fill: #57606a; font-size: 12px }
  .ours { fill: #0969da } .theirs { fill: #afb8c1 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .note { fill: #8d96a0 }
    .ours { fill: #4493f8 } .theirs { fill: #484f58 }
  }
"""
Bar = tuple[str, float, str, bool]


def draw(outcomes: list[Outcome]) -> str:
    """The throughput and latency suites as bars; groups under each other."""
    parts: list[str] = []
    y = 0
    for title, bars in groups(outcomes):
        y += 30
        parts.append(f'<text class="title" x="0" y="{y}">{escape(title)}</text>')
        y += 12
        longest = max(value for _, value, _, _ in bars)
        for bar in bars:
            parts.append(_bar(y, bar, longest))
            y += _BAR + _GAP
    size = f'width="{WIDTH}" height="{y + 10}" viewBox="0 0 {WIDTH} {y + 10}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>sideline beside other ways to do the same</title>\n"
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


def groups(outcomes: list[Outcome]) -> Iterator[tuple[str, list[Bar]]]:
    """Title and bars (label, value, text, ours) of each group."""
    for outcome in outcomes:
        if outcome.suite == "throughput":
            yield from _throughput(outcome.rows)
        if outcome.suite == "latency":
            yield from _latency(outcome.rows)


def _throughput(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[Bar]]]:
    for partitions, keys in dict.fromkeys((row["partitions"], row["keys"]) for row in rows):
        bars = [
            (row["title"], row["events_per_second"], f"{row['events_per_second']:,.0f}", _ours(row))
            for row in rows
            if (row["partitions"], row["keys"]) == (partitions, keys)
        ]
        yield f"Events per second, {partitions} partitions, {keys} keys (longer is better)", bars


def _latency(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[Bar]]]:
    for rate, partitions in dict.fromkeys((row["rate"], row["partitions"]) for row in rows):
        bars = []
        for row in rows:
            if (row["rate"], row["partitions"]) == (rate, partitions):
                for name in ("p50", "p99"):
                    value = row[f"{name}_ms"]
                    bars.append((f"{row['title']}, {name}", value, f"{value:,.1f} ms", _ours(row)))
        title = f"Append to committed effect, {rate:,}/s, {partitions} partitions"
        yield f"{title} (shorter is better)", bars


def _ours(row: dict[str, Any]) -> bool:
    return bool(row["contestant"] == "sideline")


def _bar(y: int, bar: Bar, longest: float) -> str:
    label, value, text, ours = bar
    room = WIDTH - _LEFT - 90
    width = max(1, round(room * value / longest))
    middle = y + _BAR - 5
    return (
        f'<text class="note" x="{_LEFT - 10}" y="{middle}" text-anchor="end">{escape(label)}</text>'
        f'<rect class="{"ours" if ours else "theirs"}" x="{_LEFT}" y="{y}" width="{width}" '
        f'height="{_BAR}" rx="2"/>'
        f'<text class="note" x="{_LEFT + width + 8}" y="{middle}">{escape(text)}</text>'
    )
