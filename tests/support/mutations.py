"""Rules taken out on purpose: a test that still passes without its rule proves nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from sideline.homes import kafka, transactions
from sideline.homes.numbers import Books
from sideline.homes.transactions import Transactor, Unsent
from sideline.ledger.registry import Registry
from sideline.ledger.sql import queries
from sideline.ledger.store import Held, Ledger


def break_rules(names: Iterable[str]) -> None:
    """Take rules out of this process, by name."""
    for name in names:
        RULES[name]()


def _replace(text: str, instead: str) -> Callable[[], None]:
    def apply() -> None:
        for name in ("fence", "fence_at", "fence_at_once"):
            before = queries()[name]
            assert text in before, f"{name} no longer says {text!r}"
            queries()[name] = before.replace(text, instead)

    return apply


def _believe_the_error() -> None:
    """An unclear COMMIT is taken for one that failed."""
    settle = Ledger.settle

    def trusting(self: Ledger, held: Held) -> int:
        before = held.next_offset
        settle(self, held)
        return before

    Ledger.settle = trusting  # type: ignore[method-assign]


def _take_what_is_held() -> None:
    """A pipeline's partitions are taken while a run applies a range of them again."""
    text = "\n      and progress.held_for is null"
    before = queries()["take"]
    assert text in before
    queries()["take"] = before.replace(text, "")


def _know_no_damage() -> None:
    """A run tries every event."""
    Registry.passed_over = lambda *_: {}  # type: ignore[method-assign]


def _lose_answers() -> None:
    """Kafka commits every third transaction, but its answer never comes."""
    send = Transactor.send
    calls = itertools.count(1)

    def deaf(self: Transactor, *args: Any) -> None:
        send(self, *args)
        if next(calls) % 3 == 0:
            self.drop()
            raise Unsent("no answer")

    Transactor.send = deaf  # type: ignore[method-assign]


def _abort() -> None:
    """Every third transaction is given up before its commit."""
    produce = Transactor._produce
    calls = itertools.count(1)

    def failing(self: Transactor, *args: Any) -> None:
        produce(self, *args)
        if next(calls) % 3 == 0:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    Transactor._produce = failing  # type: ignore[method-assign]


def _be_impatient() -> None:
    """Kafka is given up after a moment."""
    transactions.COMMIT_SECONDS = transactions.INIT_SECONDS = 2.0


def _do_not_ask_kafka() -> None:
    """A slice whose outcome nobody knows is taken for one that failed."""
    decide = kafka.decide

    def guess(books: Books, *args: Any, **more: Any) -> Any:
        return decide(books, *args, **more) if books.pending is None else "drop"

    kafka.decide = guess


RULES: dict[str, Callable[[], None]] = {
    "lease and owner": _replace(
        "\n  and lease = %(lease)s::bigint[]\n  and owner = %(owner)s", instead=""
    ),
    "next_offset = start": _replace("next_offset = %(start)s", instead="true"),
    "unclear commit": _believe_the_error,
    "held for a run": _take_what_is_held,
    "registry": _know_no_damage,
    "answers of Kafka": _lose_answers,
    "commits of Kafka": _abort,
    "word of Kafka": _do_not_ask_kafka,
    "patience with Kafka": _be_impatient,
}
