"""Which values may be left out unseen, and which are the same."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import pytest

from sideline.homes.judge import identities, ordered_as, refused_alone, vouches
from tests.support.columns import column, numeric, varchar

NOW = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
LOCAL = datetime(2024, 5, 6, 7, 8, 9)  # noqa: DTZ001 - without a zone on purpose
ID = UUID("6f1e6a1c-8f3e-4c4e-9c0a-2f6f0b6f7c11")


@pytest.mark.parametrize(
    ("described", "good", "bad"),
    [
        (column("int2"), [1, -32768, "12"], [32768, "32768", "01", " 1", True, 1.0]),
        (column("int4"), [2**31 - 1], [2**31, 2**40]),
        (column("int8"), [2**63 - 1], [2**63]),
        (column("text"), ["", "Zoë", "x" * 5000], ["nul\0", "\ud800", 1, b"x"]),
        (column("text", indexed=True), ["x" * 300], ["x" * 301]),
        (varchar(3), ["abc", "äöü"], ["abcd", "abc "]),
        (column("bool"), [True], [1, "true"]),
        (column("uuid"), [ID, str(ID), str(ID).upper()], ["{" + str(ID) + "}", "6f1e", 1]),
        (column("bytea"), [b"\0"], ["x"]),
        (column("float8"), [1.5, float("inf"), 3], ["1.5", 10**400]),
        (column("numeric"), [1, 1.5, Decimal("1.5")], [Decimal("NaN"), float("nan"), "1"]),
        (numeric(4, 2), [98.99, Decimal("-12.345")], [99.999, 100]),
        (column("jsonb"), [{"a": [1, None]}, []], [{"a": "\0"}, {"a": float("nan")}, {1}, "{}"]),
        (column("timestamptz"), [NOW, "2024-05-06T07:08:09.5Z"], [LOCAL, "2024-1-2", "now"]),
        (column("timestamptz"), ["2024-05-06 07:08:09+02:00"], ["2024-02-30T00:00:00Z"]),
        (column("timestamp"), [LOCAL], [NOW, "2024-05-06T07:08:09"]),
        (column("date"), [date(2024, 2, 29), "2024-02-29"], ["2023-02-29", "29.2.2024", NOW]),
        (column("money"), [], [1, "1"]),
        (column("", category="E", labels=frozenset({"red"})), ["red"], ["blue", 1]),
        (column("int4", domain=True), [], [1, None]),
        (column("", category="E", domain=True, labels=frozenset({"red"})), [], ["red"]),
    ],
)
def test_verdicts(described, good, bad):
    """What PostgreSQL would refuse, or might, is never vouched for (K9)."""
    assert [value for value in good if not vouches(described, [value])] == []
    assert [value for value in bad if vouches(described, [value])] == []


@pytest.mark.parametrize("limit", [3, None])
@pytest.mark.parametrize(
    "values",
    [
        ["abc", "abcd", "x" * 400, "äöü", ""],
        ["abc", "nul\0", "abcd"],
        ["abc", None, "abcd"],
        ["abc", 7, "abcd"],
        [1, 2**31, -(2**31), -(2**31) - 1],
        [1, "2", 2**40],
        [None, 5],
        [],
    ],
    ids=repr,
)
def test_those_found_at_once_are_those_found_one_by_one(values, limit):
    """A crowd is judged as each of it would be; where that cannot be, it is not tried (K9)."""
    text = column("text", indexed=True) if limit is None else varchar(limit)
    for described in (text, column("int4"), column("int4", not_null=True), column("uuid")):
        found = refused_alone(described, values)
        alone = [n for n, value in enumerate(values) if not vouches(described, [value])]
        assert found in (None, alone)
    numbers = refused_alone(column("int4"), [1, 2**31, -(2**31), -(2**31) - 1])
    assert numbers == [1, 3]
    assert refused_alone(varchar(3), ["abcd", "abc"]) == [0]


def test_null():
    """NULL is vouched for where the column takes it (K9)."""
    assert vouches(column("int4"), [None, 1])
    assert not vouches(column("int4", not_null=True), [None, 1])


def test_one_bad_value_spoils_the_column():
    """A verdict on many values is a verdict on each."""
    assert not vouches(varchar(3), ["ab", "abcd", "a"])


@pytest.mark.parametrize(
    ("described", "values", "same"),
    [
        (column("int4"), [1, "1", 2], [1, 1, 2]),
        (column("text"), ["a", "A"], ["a", "A"]),
        (column("uuid"), [ID, str(ID).upper()], [str(ID), str(ID)]),
        (column("numeric"), [1, Decimal("1.0")], [1, 1]),
        (column("timestamptz"), [NOW], [NOW]),
        (varchar(3), ["abc"], ["abc"]),
    ],
)
def test_identities(described, values, same):
    """Equal in Python where, and only where, PostgreSQL finds them equal (K9)."""
    assert list(identities(described, values)) == same


@pytest.mark.parametrize(
    ("described", "values"),
    [
        (column("int4"), [1, True]),
        (column("int4"), [1, 1.0]),
        (column("int4"), ["01"]),
        (column("int4"), [" 1"]),
        (column("text", deterministic=False), ["a"]),
        (column("text"), ["1", 1]),
        (varchar(3), ["abc "]),
        (column("bpchar"), ["a"]),
        (column(""), ["a"]),
        (column("uuid"), ["{" + str(ID) + "}"]),
        (column("timestamptz"), ["2024-05-06T07:08:09Z"]),
        (column("timestamptz", typmod=0), [NOW]),
        (column("numeric"), [Decimal("NaN")]),
        (numeric(4, 2), [1]),
        (column("int4", domain=True), [1]),
    ],
)
def test_identities_that_cannot_be_told(described, values):
    """Types that normalise, or values of several types: PostgreSQL has to say (K9)."""
    assert identities(described, values) is None


def test_versions_sort_as_in_postgresql():
    """Text is never compared as text where the column is no text (F10)."""
    instants = column("timestamptz")
    late, early = "2024-01-10T00:00:00Z", "2024-01-09T23:00:00-02:00"
    assert ordered_as(instants, late) < ordered_as(instants, early)
    assert ordered_as(instants, "2024-1-2") is None
    assert ordered_as(column("text"), "b") is None
    assert ordered_as(column("int8"), "5") is None
    assert ordered_as(column("float8"), float("nan")) is None
    assert ordered_as(column("int8"), 5) == 5
