"""Array literals say what PostgreSQL reads back."""

from __future__ import annotations

import pytest

from sideline import arrays


@pytest.mark.parametrize(
    ("values", "literal"),
    [
        ([], "{}"),
        (["a", ""], '{"a",""}'),
        (["NULL", "{,}"], '{"NULL","{,}"}'),
        (['a"b', "c\\d"], '{"a\\"b","c\\\\d"}'),
        (["a", None, 'b"'], '{"a",NULL,"b\\""}'),
        ([None, None], "{}"),
    ],
)
def test_texts(values, literal):
    """Nothing in a text ends its element; all missing is nothing, for unnest() fills up (F13)."""
    assert arrays.texts(values) == literal


@pytest.mark.parametrize(
    ("values", "literal"),
    [
        ([], "{}"),
        ([b"\x00\xff", b""], '{"\\\\x00ff","\\\\x"}'),
        ([b"a", None], '{"\\\\x61",NULL}'),
        ([None], "{NULL}"),
    ],
)
def test_blobs(values, literal):
    """Any bytes, empty ones and missing ones told apart (F13)."""
    assert arrays.blobs(values) == literal


@pytest.mark.parametrize(
    ("values", "literal"),
    [([], "{}"), ([1, -(2**63)], "{1, -9223372036854775808}"), ([None, 2], "{NULL, 2}")],
)
def test_numbers(values, literal):
    """All 64 bits, and missing ones."""
    assert arrays.numbers(values) == literal


@pytest.mark.parametrize(
    ("names", "literal"),
    [
        ([], "{}"),
        (["a", "a"], '{"a","a"}'),
        (["a\0b", "\0"], '{"a�b","�"}'),
        (['"\0', "\\"], '{"\\"�","\\\\"}'),
    ],
)
def test_header_names(names, literal):
    """PostgreSQL can keep them, whatever they are: a NUL is replaced (F13, F14)."""
    assert arrays.header_names([(name, None) for name in names]) == literal
