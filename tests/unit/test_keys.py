"""Keys as the ledger knows them."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline.keys import mark, marks_of, signed
from sideline.slices import Aside


@given(st.lists(st.binary()))
def test_marks_survive_the_way_through_the_ledger(keys):
    """As signed numbers of four bytes, the highest byte first."""
    packed = b"".join(signed(mark(key)).to_bytes(4, "big", signed=True) for key in keys)
    assert marks_of(packed) == {crc32(key) for key in keys}


@pytest.mark.parametrize("marked", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_mark_fits_an_integer_column(marked):
    """PostgreSQL has no unsigned numbers."""
    assert -(2**31) <= signed(marked) < 2**31
    assert signed(marked) % 2**32 == marked


def test_only_keys_with_a_mark_are_asked_for():
    """And those not twice."""
    aside = Aside(marks={mark(b"a"), mark(b"b"), mark(b"")})
    assert sorted(aside.unsure([b"a", None, b"c", b"b", b"a", b""])) == [b"", b"a", b"b"]
    aside.kafka.add(b"a")
    aside.absent.add(b"b")
    assert aside.unsure([b"a", b"b", b"c", b""]) == [b""]
    assert Aside().unsure([b"a"]) == []
