"""Spans of time as people write them: ``100ms``, ``2s``, ``10m``, ``1h``, ``7d``."""

from __future__ import annotations

import re
from datetime import timedelta

from sideline.errors import ConfigurationError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", re.ASCII)

Duration = str | int | float | timedelta


def seconds(span: Duration, *, what: str = "a duration") -> float:
    """The span in seconds; bare numbers are seconds already."""
    if isinstance(span, timedelta):
        value = span.total_seconds()
    elif isinstance(span, bool):
        value = -1.0
    elif isinstance(span, int | float):
        value = float(span)
    else:
        match = _FORM.fullmatch(span)
        value = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 <= value < float("inf"):
        message = f"{what} is {span!r}, which is not a span of time."
        raise ConfigurationError(message, hint="Write it like 100ms, 2s, 10m, 1h or 7d.")
    return value
