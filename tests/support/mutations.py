"""Rules taken out on purpose: a test that still passes without its rule proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sideline.ledger.sql import queries
from sideline.ledger.store import Held, Ledger


def break_rules(names: Iterable[str]) -> None:
    """Take rules out of this process, by name."""
    for name in names:
        RULES[name]()


def _replace(text: str, instead: str) -> Callable[[], None]:
    def apply() -> None:
        for name in ("fence", "fence_at"):
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


RULES: dict[str, Callable[[], None]] = {
    "lease and owner": _replace(
        "\n  and lease = %(lease)s::bigint[]\n  and owner = %(owner)s", instead=""
    ),
    "next_offset = start": _replace("next_offset = %(start)s", instead="true"),
    "unclear commit": _believe_the_error,
}
