"""What the JVM made of a lease's events: rows by offset, for ``event.row``.

The worker reads its events itself, as always: their bytes, holes and ends are Kafka's own. Beside
them lies a file with what ``prepare=`` made of them. An event that has no row there was left out by
it; one that the JVM could not take at all fails as if its handler had.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from msgspec import structs

from sideline.errors import PrepareFailed, Recoverable, RefusedError
from sideline.slices import NOTHING

if TYPE_CHECKING:
    import pyarrow as pa

    from sideline.events import Event
    from sideline.pipeline import Pipeline

# Columns of ours among those of the user.
OURS = "__sideline_"
ORDER, SLOT, BACK, NOTE = f"{OURS}order", f"{OURS}slot", f"{OURS}back", f"{OURS}note"
ID = ("topic", "partition", "offset")
# Rows that are made into Python at a time.
CHUNK_ROWS = 1_000

Id = tuple[bool, str, int, int]
"""Whether it comes back from the ledger; topic, partition, offset."""
Row = dict[str, Any]


class Note(NamedTuple):
    """What the driver says about the events of a lease; it travels as JSON."""

    failing: dict[Id, tuple[str, str]]
    """Events that the JVM could not take: class and message of its error."""
    back: frozenset[Id]
    """Events of the ledger that went through ``prepare=``, with or without a row."""

    def dump(self) -> dict[str, Any]:
        """For JSON."""
        failing = [[*event, *why] for event, why in self.failing.items()]
        return {"failing": failing, "back": [list(event) for event in sorted(self.back)]}

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Note:
        """From JSON."""
        failing = {tuple(one[:4]): (one[4], one[5]) for one in data["failing"]}
        return cls(failing, frozenset(tuple(one) for one in data["back"]))


class Run:
    """The rows of one partition, in the order of their offsets."""

    def __init__(self, offsets: Any, rows: pa.Table | None) -> None:  # noqa: ANN401 - numpy's array
        self._offsets = offsets
        self._rows = rows
        """None: the step added nothing, it only left events out."""
        self._chunk: tuple[int, list[Row]] = (0, [])

    def find(self, offset: int) -> Row | None:
        """The row of an event; None: it has none."""
        place = int(self._offsets.searchsorted(offset))
        if place == len(self._offsets) or self._offsets[place] != offset:
            return None
        if self._rows is None:
            return {}
        first, rows = self._chunk
        if not first <= place < first + len(rows):
            # Handlers may run side by side: the chunk is replaced as a whole.
            first, rows = place, self._rows.slice(place, CHUNK_ROWS).to_pylist()
            self._chunk = (first, rows)
        return rows[place - first]


class Rows:
    """The rows of one lease."""

    def __init__(self, note: Note, runs: Mapping[tuple[bool, str, int], Run]) -> None:
        self._note = note
        self._runs = runs

    @classmethod
    def read(cls, folder: str) -> Rows:
        """What a task put into a folder."""
        import pyarrow as pa  # noqa: PLC0415 - only pipelines that prepare need it

        note = Note.load(orjson.loads((Path(folder) / "note.json").read_bytes()))
        with pa.memory_map(str(Path(folder) / "rows.arrow")) as file:
            return cls(note, dict(_runs(pa.ipc.open_stream(file).read_all())))

    def knows(self, event: Event) -> bool:
        """Whether the event went through ``prepare=``; all live ones of a lease did."""
        return not event.delivery.replayed or _id(event) in self._note.back

    def leaves_out(self, event: Event) -> bool:
        """Whether ``prepare=`` left it out."""
        return _id(event) not in self._note.failing and self._find(event) is None

    def row(self, event: Event) -> Row | None:
        """What ``prepare=`` made of it; None: left out. Raises what the JVM said of it."""
        if self._note.failing:
            why = self._note.failing.get(_id(event))
            if why is not None:
                raise failure(*why)
        return self._find(event)

    def _find(self, event: Event) -> Row | None:
        run = self._runs.get((event.delivery.replayed, event.topic, event.partition))
        return None if run is None else run.find(event.offset)


class Preparation:
    """Stands before the handler of a pipeline with ``prepare=``; knows the rows of the lease."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.rows: Rows | None = None
        pipeline.handle = self._before(pipeline.handle)
        pipeline.left_out = self.leaves_out

    def knows(self, event: Event) -> bool:
        """Whether the event may be handled in this lease."""
        return self.rows is not None and self.rows.knows(event)

    def leaves_out(self, event: Event) -> bool:
        """Whether ``prepare=`` left it out."""
        return self._known(event).leaves_out(event)

    def _known(self, event: Event) -> Rows:
        # Whoever leases without rows reads nothing: see `Worker.work`.
        if self.rows is None or not self.rows.knows(event):
            raise Recoverable(f"event {event.id} has not been through prepare= yet")
        return self.rows

    def _before(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(handle):

            @wraps(handle)
            async def later(event: Event, *more: Any) -> Any:  # noqa: ANN401 - the handler's own
                row = self._known(event).row(event)
                return NOTHING if row is None else await handle(_with(event, row), *more)

            return later

        @wraps(handle)
        def now(event: Event, *more: Any) -> Any:  # noqa: ANN401 - the handler's own
            row = self._known(event).row(event)
            return NOTHING if row is None else handle(_with(event, row), *more)

        return now


def failure(name: str, message: str) -> PrepareFailed:
    """The JVM's error, under its own name."""
    kind: type[PrepareFailed] = type(name, (PrepareFailed,), {"__module__": "builtins"})
    return kind(message)


def _with(event: Event, row: Row) -> Event:
    return structs.replace(event, row=row)


def _id(event: Event) -> Id:
    return event.delivery.replayed, event.topic, event.partition, event.offset


def _runs(table: pa.Table) -> Iterator[tuple[tuple[bool, str, int], Run]]:
    """The rows of each partition, which stand together; one row an event, or none is taken."""
    if not table.num_rows:
        return
    backs = table.column(BACK).to_numpy()
    numbers = table.column("partition").to_numpy()
    offsets = table.column("offset").to_numpy()
    topics = table.column("topic").combine_chunks().dictionary_encode()
    if hasattr(topics, "combine_chunks"):
        topics = topics.combine_chunks()
    names, codes = topics.dictionary.to_pylist(), topics.indices.to_numpy(zero_copy_only=False)
    changes = (
        (backs[1:] != backs[:-1]) | (numbers[1:] != numbers[:-1]) | (codes[1:] != codes[:-1])
    ).nonzero()[0]
    edges = [0, *(int(place) + 1 for place in changes), table.num_rows]
    more = [name for name in table.column_names if not name.startswith(OURS) and name not in ID]
    rows = table.select(more) if more else None
    for start, end in pairwise(edges):
        topic, number = names[int(codes[start])], int(numbers[start])
        some = offsets[start:end]
        twice = (some[1:] == some[:-1]).nonzero()[0]
        if len(twice):
            raise _several(f"{topic}/{number}/{int(some[twice[0]])}")
        some_rows = None if rows is None else rows.slice(start, end - start)
        yield (bool(backs[start]), topic, number), Run(some, some_rows)


def _several(event: str) -> RefusedError:
    message = f"prepare= makes several rows of event {event}."
    hint = "An event is one row: explode, or join with several matches, in the handler."
    return RefusedError(message, hint=hint)
