"""Table names as people write them."""

from __future__ import annotations

import pytest

from sideline.homes.names import parse_table, quote


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("users", ("users",)),
        ("Users", ("users",)),
        ("app.users", ("app", "users")),
        ('"Weird Name"."T"', ("Weird Name", "T")),
        ('app."a.b"', ("app", "a.b")),
        ('"say ""hi"""', ('say "hi"',)),
        ("größe$1", ("größe$1",)),
    ],
)
def test_names(name, parts):
    """Names are read as SQL reads them."""
    assert parse_table(name) == parts


@pytest.mark.parametrize(
    "name",
    ["", ".", "a.", ".a", "a b", 'a"b', '"open', "a.b.c", "1a", "a; drop table b", '""', "a-b"],
)
def test_garbage(name):
    """What is no name is refused in so many words."""
    with pytest.raises(ValueError, match="is not the name of a table"):
        parse_table(name)


def test_not_text():
    """A name of another type is refused."""
    with pytest.raises(TypeError):
        parse_table(None)


def test_quoted_for_statements_with_parameters():
    """A % in a name is no parameter."""
    assert quote("a", '100%"') == '"a"."100%%"""'
