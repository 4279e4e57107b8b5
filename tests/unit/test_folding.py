"""What remains of many changes of one row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sideline.folding import fold, in_key_order, layers, unfolded


def newer(standing, coming):
    """By the column v, None lowest, as a version guard does."""
    if standing["v"] is None:
        return True
    return coming["v"] is not None and coming["v"] >= standing["v"]


def undecided(_standing, _coming):
    return None


def apply(changes, row, *, guarded):
    """What a database makes of changes: of one row that may be there."""
    for delete, change in changes:
        if delete:
            row = None
        if change is None:
            continue
        if row is None:
            row = {"v": None, **change}
        elif not guarded or newer(row, change):
            row = {**row, **change}
    return row


def test_last_one_wins():
    """The later write of a row replaces the earlier one (C1)."""
    assert fold([{"a": 1}, {"a": 2}], None) == [(False, {"a": 2})]


def test_partial_rows_merge():
    """Columns that the later row does not name stay."""
    assert fold([{"a": 1, "b": 1}, {"b": 2, "c": 2}], None) == [(False, {"a": 1, "b": 2, "c": 2})]


def test_a_delete_in_between_resets_what_is_not_named_afterwards():
    """Upsert, delete, upsert ends as the last one says, without leftovers of the first."""
    assert fold([{"a": 1, "b": 1}, None, {"b": 2}], None) == [(True, {"b": 2})]


def test_a_delete_at_the_end_is_all_that_remains():
    """Upserts before a delete leave nothing."""
    assert fold([{"a": 1}, {"a": 2}, None], None) == [(True, None)]


def test_highest_version_wins_and_the_later_of_equal_ones():
    """An older event never replaces a newer row inside a slice (F10)."""
    rows = [{"v": 2, "n": "b"}, {"v": 1, "n": "a"}, {"v": 2, "n": "c"}, {"v": None, "n": "d"}]
    assert fold(rows, newer) == [(False, {"v": 2, "n": "c"})]


def test_versioned_rows_of_different_columns_stay_apart():
    """Which of them the guard lets pass depends on the row in the database (F10)."""
    rows = [{"v": 2, "n": "b"}, {"v": 3, "m": "x"}]
    assert fold(rows, newer) == unfolded(rows)


def test_versions_that_cannot_be_compared_stay_apart():
    """Nothing is decided in Python that PostgreSQL might decide otherwise (F10)."""
    rows = [{"v": "2024-1-2"}, {"v": "2024-01-10"}]
    assert fold(rows, undecided) == unfolded(rows)


def test_rows_nobody_vouches_for_are_all_written():
    """An error that a later row would hide reaches the database (K9)."""
    rows = [{"a": "too long"}, {"a": "ok"}]
    assert layers([1, 1], rows, vouched=lambda places: False, newer=None) == [
        {1: (False, rows[0])},
        {1: (False, rows[1])},
    ]


def test_a_row_stands_once_in_a_layer():
    """One statement can change a row once."""
    rows = [{"a": 1}, {"a": 2}, {"a": 3}, None]
    found = layers(["x", "y", "x", "y"], rows, vouched=lambda places: False, newer=None)
    assert [list(layer) for layer in found] == [["x", "y"], ["x", "y"]]


def test_key_order_does_without_an_order():
    """Keys that do not compare stay as they came."""
    layer = {"a": (True, None), 1: (True, None)}
    assert in_key_order(layer) == layer
    assert list(in_key_order({2: layer[1], 1: layer[1]})) == [1, 2]


columns = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3)
versions = st.one_of(st.none(), st.integers(0, 3))
plain = st.one_of(st.none(), columns)
guarded = st.one_of(st.none(), st.builds(lambda v, row: {**row, "v": v}, versions, columns))


@given(st.lists(plain, max_size=6), st.one_of(st.none(), columns))
def test_folded_equals_one_by_one(rows, before):
    """Whatever stands in the database, folding does not change the outcome (C1)."""
    row = None if before is None else {"v": None, **before}
    assert apply(fold(rows, None), row, guarded=False) == apply(unfolded(rows), row, guarded=False)


@given(st.lists(guarded, max_size=6), st.one_of(st.none(), columns), versions)
def test_folded_equals_one_by_one_under_a_version(rows, before, version):
    """The same with a version guard, whatever version stands in the database (F10)."""
    row = None if before is None else {**before, "v": version}
    assert apply(fold(rows, newer), row, guarded=True) == apply(unfolded(rows), row, guarded=True)
