"""Ages as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sideline.retention import Retention, age, shown


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30d", timedelta(days=30)),
        ("12h", timedelta(hours=12)),
        ("never", None),
        ("0s", timedelta()),
    ],
)
def test_an_age(text, found):
    """A span of time, or never."""
    assert age(text) == found
    assert age(shown(found)) == found


@pytest.mark.parametrize(
    "text", ["", "30", 30, 3.5, None, True, [], "-1d", "1w", "nan", "9" * 40 + "d"]
)
def test_no_age(text):
    """A bare number would be seconds, and nobody means that."""
    with pytest.raises(ValueError, match="neither an age like 30d nor never"):
        age(text)


def test_by_default_the_audit_is_kept():
    """What people did is not forgotten unless somebody says so (S6)."""
    assert Retention().audit is None
    assert Retention().events == timedelta(days=30)
