"""Which rows may be left out where a later one replaces them, and which are the same (pure).

A verdict is "vouch" (PostgreSQL would take this row) or "cannot vouch" (ask PostgreSQL).
Vouching wrongly would hide an error, so in doubt it does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Sequence
from datetime import date, datetime
from decimal import Decimal
from math import isfinite
from typing import Any
from uuid import UUID

from sideline.homes.tables import Column
from sideline.homes.values import json_text

_NONE = type(None)
_RANGES = {
    "int2": (-(2**15), 2**15 - 1),
    "int4": (-(2**31), 2**31 - 1),
    "int8": (-(2**63), 2**63 - 1),
}
# An index entry has room for a third of a page; in the widest encoding that is 600 characters.
_INDEXED_CHARACTERS = 300
_VARLENA_HEADER = 4
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)
_INSTANT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
    r"(?:Z|[+-][0-9]{2}:[0-9]{2})",
    re.ASCII,
)
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
# Beyond this nobody counts money, and every integer below has an exact text.
_LARGE = 10**300


def vouches(column: Column, values: Collection[Any]) -> bool:
    """Whether PostgreSQL would take every one of these values for the column."""
    kinds = set(map(type, values))
    if _NONE in kinds:
        if column.not_null:
            return False
        kinds.discard(_NONE)
        values = [value for value in values if value is not None]
    if column.domain:  # it may have rules of its own, about NULL too
        return False
    if not kinds:
        return True
    judge = _JUDGES.get(column.type)
    if judge is None:
        return column.category == "E" and kinds == {str} and column.labels.issuperset(values)
    return judge(column, values, kinds)


def refused_alone(column: Column, values: Sequence[Any]) -> list[int] | None:
    """Where the values are that nobody vouches for; None: they must be asked in groups.

    For what most columns hold: a crowd with some that are too long or too large costs no more
    than one without.
    """
    if column.domain or column.type not in _MEASURED:
        return None
    kinds = set(map(type, values))
    if column.type in _RANGES:
        if kinds != {int}:
            return None
        low, high = _RANGES[column.type]
        return [place for place, value in enumerate(values) if not low <= value <= high]
    if kinds != {str} or not _storable("".join(values)):
        return None
    most = _most_characters(column)
    if most is None:
        return []
    return [place for place, value in enumerate(values) if len(value) > most]


def _most_characters(column: Column) -> int | None:
    limits = []
    if column.typmod >= 0:
        limits.append(column.typmod - _VARLENA_HEADER)
    if column.indexed:
        limits.append(_INDEXED_CHARACTERS)
    return min(limits, default=None)


def _integers(column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    low, high = _RANGES[column.type]
    if kinds == {str}:
        if not all(map(_INTEGER.fullmatch, values)):
            return False
        values = list(map(int, values))
    elif kinds != {int}:
        return False
    return bool(low <= min(values) and max(values) <= high)


def _texts(column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    if kinds != {str}:
        return False
    most = _most_characters(column)
    if most is not None and max(map(len, values)) > most:
        return False
    return _storable("".join(values))


def _storable(text: str) -> bool:
    if "\0" in text:
        return False
    return text.isascii() or _encodable(text)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _booleans(_column: Column, _values: Collection[Any], kinds: set[type]) -> bool:
    return kinds == {bool}


def _uuids(_column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    return kinds == {UUID} or (kinds == {str} and all(map(_UUID.fullmatch, values)))


def _binaries(column: Column, _values: Collection[Any], kinds: set[type]) -> bool:
    return kinds == {bytes} and not column.indexed


def _floats(_column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    return kinds == {float} or (
        kinds <= {int, float} and all(abs(value) < _LARGE for value in values if type(value) is int)
    )


def _numerics(column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    if not kinds <= {int, float, Decimal}:
        return False
    limit = _LARGE
    if column.typmod >= 0:
        precision, scale = divmod(column.typmod - _VARLENA_HEADER, 1 << 16)
        if scale >= 1 << 10 or scale > precision:  # negative scales and the like
            return False
        limit = 10 ** (precision - scale) - 1  # rounding up must still fit
    return all(_finite(value) and -limit < value < limit for value in values)


def _finite(value: float | Decimal) -> bool:
    """Neither NaN, which compares with nothing (and as Decimal raises), nor infinity."""
    if isinstance(value, Decimal):
        return value.is_finite()
    return not isinstance(value, float) or isfinite(value)


def _documents(column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    if column.indexed or not kinds <= {dict, list}:
        return False
    try:
        texts = [json_text(value) for value in values]
    except (TypeError, ValueError, RecursionError):
        return False
    return not any("\\u0000" in text or "NaN" in text or "Infinity" in text for text in texts)


def _instants(_column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    if kinds == {datetime}:
        return all(value.tzinfo is not None for value in values)
    return kinds == {str} and all(instant(value) is not None for value in values)


def _local_times(_column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    return kinds == {datetime} and all(value.tzinfo is None for value in values)


def _days(_column: Column, values: Collection[Any], kinds: set[type]) -> bool:
    return kinds == {date} or (kinds == {str} and all(map(_day, values)))


def instant(text: str) -> datetime | None:
    """The moment that an ISO 8601 text with an offset names, if both of us read it alike."""
    if not _INSTANT.fullmatch(text):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    # Years at the edge fall over it in another time zone; offsets beyond 15:59 are refused.
    offset = found.utcoffset()
    if not 2 <= found.year <= 9998 or offset is None or abs(offset.total_seconds()) >= 15 * 3600:  # noqa: PLR2004 - see above
        return None
    return found


def _day(text: str) -> bool:
    if not _DAY.fullmatch(text):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


_JUDGES: dict[str, Callable[[Column, Collection[Any], set[type]], bool]] = {
    "int2": _integers,
    "int4": _integers,
    "int8": _integers,
    "text": _texts,
    "varchar": _texts,
    "bool": _booleans,
    "uuid": _uuids,
    "bytea": _binaries,
    "float8": _floats,
    "numeric": _numerics,
    "json": _documents,
    "jsonb": _documents,
    "timestamptz": _instants,
    "timestamp": _local_times,
    "date": _days,
}


_MEASURED = frozenset({*_RANGES, "text", "varchar"})


def identities(  # noqa: C901, PLR0911, PLR0912 - a table of types
    column: Column, values: Sequence[Any]
) -> Sequence[Hashable] | None:
    """Values that are equal where, and only where, PostgreSQL finds these equal.

    None: cannot be told from here (1 and "01", "a" and "A" in citext, char(3) ...).
    """
    kinds = set(map(type, values))
    if column.domain:
        return None
    match column.type:
        case "int2" | "int4" | "int8" if kinds == {int}:
            return values
        case "int2" | "int4" | "int8" if kinds == {str} and all(map(_INTEGER.fullmatch, values)):
            return list(map(int, values))
        case "int2" | "int4" | "int8" if kinds == {int, str}:
            return _all_or_none([_integer(value) for value in values])
        case "text" | "varchar" if kinds == {str} and _is_plain_text(column, values):
            return values
        case "uuid" if kinds == {str} and all(map(_UUID.fullmatch, values)):
            return list(map(str.lower, values))
        case "uuid" if kinds <= {UUID, str}:
            return _all_or_none([_uuid(value) for value in values])
        case "bool" if kinds == {bool}:
            return values
        case "bytea" if kinds == {bytes}:
            return values
        case "date" if kinds == {date}:
            return values
        case "timestamptz" if kinds == {datetime} and column.typmod < 0:
            return values if all(value.tzinfo is not None for value in values) else None
        case "timestamp" if kinds == {datetime} and column.typmod < 0:
            return values if all(value.tzinfo is None for value in values) else None
        case "numeric" if kinds <= {int, Decimal} and column.typmod < 0:
            return values if all(map(_finite, values)) else None
        case _:
            return None


def _is_plain_text(column: Column, values: Sequence[Any]) -> bool:
    """A text that is too long loses its trailing spaces and becomes another one."""
    if not column.deterministic:
        return False
    return column.typmod < 0 or max(map(len, values)) <= column.typmod - _VARLENA_HEADER


def _all_or_none(values: list[Hashable | None]) -> Sequence[Hashable] | None:
    return None if None in values else values


def _integer(value: int | str) -> int | None:
    if isinstance(value, int):
        return value
    return int(value) if _INTEGER.fullmatch(value) else None


def _uuid(value: UUID | str) -> str | None:
    if isinstance(value, UUID):
        return str(value)
    return value.lower() if _UUID.fullmatch(value) else None


def ordered_as(column: Column, value: Any) -> Any | None:  # noqa: ANN401, PLR0911 - a table of types
    """A value that sorts among others of the column as PostgreSQL sorts them; None: unknown."""
    kind = type(value)
    if column.domain:
        return None
    match column.type:
        case "int2" | "int4" | "int8" if kind is int:
            return value
        case "numeric" if kind in {int, Decimal} and column.typmod < 0:
            return value if _finite(value) else None
        case "float8" if kind is float:
            return value if _finite(value) else None
        case "timestamptz" if column.typmod < 0:
            if kind is datetime:
                return value if value.tzinfo is not None else None
            return instant(value) if kind is str else None
        case "timestamp" if kind is datetime and column.typmod < 0:
            return value if value.tzinfo is None else None
        case "date" if kind is date:
            return value
        case _:
            return None
