"""How Hypothesis tries things out against a real database."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(number):
    """So many of them, however long each takes; what the fixture made serves all."""
    return settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
