"""Message ids: UUIDs that sort by time, unique whatever threads, forks and clocks do."""

from __future__ import annotations

import threading
import time
import uuid

from sideline import message_ids
from sideline.message_ids import Ids


def test_an_id_is_a_uuid_of_version_7_with_its_time():
    """Any reader of UUIDs finds version, variant and millisecond in it (P1)."""
    ids = Ids()
    made = uuid.UUID(ids.new().decode())

    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == ids.millisecond


def test_an_id_has_the_time_at_which_it_was_made():
    """Also after nobody wanted one for a while: the old millisecond is not gone on with (P1)."""
    ids = Ids()
    ids.new()
    waited = time.time_ns() // 1_000_000 + 3
    while time.time_ns() // 1_000_000 < waited:
        pass

    assert uuid.UUID(ids.new().decode()).int >> 80 >= waited


def test_ids_are_unique_and_sort_in_the_order_in_which_they_were_made():
    """More of them than a millisecond has numbers (P1)."""
    ids = Ids()
    made = [ids.new().decode() for _ in range(20_000)]

    assert len(set(made)) == len(made)
    assert made == sorted(made)
    assert all(str(uuid.UUID(one)) == one for one in made[:100])


def test_ids_grow_also_when_the_clock_is_set_back(monkeypatch):
    """A clock that goes back an hour makes no smaller id (P1)."""
    ids = Ids()
    before = ids.new()
    monkeypatch.setattr(message_ids, "time_ns", lambda: 1_000_000)
    ids.turn()

    assert ids.new() > before


def test_threads_never_get_the_same_id():
    """Four threads side by side (P1)."""
    ids = Ids()
    made: list[list[bytes]] = [[] for _ in range(4)]

    def make(into: list[bytes]) -> None:
        into.extend(ids.new() for _ in range(5_000))

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    together = [one for some in made for one in some]
    assert len(set(together)) == 20_000


def test_two_who_make_ids_never_make_the_same():
    """Publishers of one process have no series in common (P1)."""
    one, other = Ids(), Ids()

    assert not {one.new() for _ in range(5_000)} & {other.new() for _ in range(5_000)}
