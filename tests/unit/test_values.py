"""Python values as PostgreSQL reads them."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import ip_address
from uuid import UUID

import pytest
from psycopg.types.json import Jsonb

from sideline.homes.values import column_literal, json_text, text_of
from tests.support.columns import column

TEXT = column("text")
INT = column("int4")
TIMES = column("timestamptz")
ARRAY = column("_text", category="A")
JSON = column("jsonb")


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("described", "value", "text"),
    [
        (TEXT, "Zoë", "Zoë"),
        (TEXT, 5, "5"),
        (TEXT, Colour.RED, "red"),
        (INT, Level.HIGH, "3"),
        (INT, 2**70, str(2**70)),
        (INT, 3.0, "3"),
        (INT, Decimal("3.00"), "3"),
        (INT, 3.5, "3.5"),
        (INT, True, "true"),
        (column("float8"), float("nan"), "nan"),
        (column("numeric"), 0.1234567890123456, "0.1234567890123456"),
        (column("bytea"), b"\x00\xff", "\\x00ff"),
        (column("bytea"), bytearray(b"a"), "\\x61"),
        (column("uuid"), UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (TIMES, datetime(2024, 1, 2, 3, tzinfo=UTC), "2024-01-02T03:00:00+00:00"),
        (
            column("timestamp"),
            datetime(2024, 1, 2, 3, tzinfo=timezone(timedelta(hours=2))),
            "2024-01-02T01:00:00",
        ),
        (column("date"), date(2024, 1, 2), "2024-01-02"),
        (column("time"), time(1, 2), "01:02:00"),
        (column("interval"), timedelta(days=-1, seconds=5), "-1 days 5 seconds 0 microseconds"),
        (column("inet"), ip_address("::1"), "::1"),
        (JSON, {"a": None}, '{"a": null}'),
        (JSON, [1, "x"], '[1,"x"]'),
        (JSON, Jsonb({"a": 1}), '{"a":1}'),
        (JSON, 5, "5"),
        (ARRAY, ["a", None, 'q"\\'], '{"a",NULL,"q\\"\\\\"}'),
        (ARRAY, [[1, 2], [3, 4]], '{{"1","2"},{"3","4"}}'),
        (ARRAY, (), "{}"),
    ],
)
def test_text(described, value, text):
    """Every type has one text, that of the column's own input."""
    assert text_of(described, value) == text


@pytest.mark.parametrize(
    ("described", "value"),
    [
        (TEXT, b"bytes"),
        (TEXT, {"a": 1}),
        (TEXT, ["a"]),
        (TIMES, 20240101),
        (TIMES, 1.5),
        (TIMES, True),
        (INT, object()),
        (TEXT, {1, 2}),
    ],
)
def test_misfits(described, value):
    """What could only be guessed at is refused."""
    with pytest.raises(TypeError, match="cannot take a value of type"):
        text_of(described, value)


@pytest.mark.parametrize(
    ("described", "values", "literal"),
    [
        (INT, [1, 2, 3], "{1, 2, 3}"),
        (INT, [1, None], "{1,NULL}"),
        (TEXT, ["a", "b,c", "{", "NULL", ""], '{"a","b,c","{","NULL",""}'),
        (TEXT, ['say "hi"', "a"], '{"say \\"hi\\"","a"}'),
        (TEXT, ["back\\slash"], '{"back\\\\slash"}'),
        (TEXT, ['","', "x"], '{"\\",\\"","x"}'),
        (TEXT, [None, "x", 1], '{NULL,"x","1"}'),
        (TEXT, [None], "{NULL}"),
        (column("bool"), [True, None], "{true,NULL}"),
    ],
)
def test_literals(described, values, literal):
    """A column of values is one array, whatever characters are in it."""
    assert column_literal(described, values) == literal


def test_json_keeps_what_is_no_json():
    """A NaN is not turned into null without a word."""
    assert json_text({"a": float("nan"), "b": None}) == '{"a": NaN, "b": null}'


def test_json_of_large_numbers():
    """Integers beyond 64 bits are exact."""
    assert json_text({"a": 2**70}) == f'{{"a": {2**70}}}'
