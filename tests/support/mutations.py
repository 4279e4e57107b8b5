"""Rules taken out on purpose: a test that still passes without its rule proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sideline.ledger.sql import queries


def break_rules(names: Iterable[str]) -> None:
    """Take rules out of this process, by name."""
    for name in names:
        RULES[name]()


def _without(text: str, *statements: str, instead: str = "") -> Callable[[], None]:
    def apply() -> None:
        for name in statements:
            before = queries()[name]
            assert text in before, f"{name} no longer says {text!r}"
            queries()[name] = before.replace(text, instead)

    return apply


def _trust_positions() -> None:
    """K2: a buffer is used whatever range it covers."""
    from sideline.engine.reader import Span

    Span.covers = lambda self, offset: True  # type: ignore[method-assign]


def _believe_the_error() -> None:
    """K5: an unclear COMMIT is taken for one that failed."""
    from sideline.ledger.store import Ledger

    settle = Ledger.settle

    def trusting(self, held):
        before = held.next_offset
        settle(self, held)
        return before

    Ledger.settle = trusting  # type: ignore[method-assign]


_FENCES = ("fence", "fence_at")
RULES: dict[str, Callable[[], None]] = {
    "lease and owner": _without(
        "\n  and lease = %(lease)s::bigint[]\n  and owner = %(owner)s", *_FENCES
    ),
    "next_offset = start": _without("next_offset = %(start)s", *_FENCES, instead="true"),
    "next_offset = start, not <=": _without(
        "next_offset = %(start)s", *_FENCES, instead="next_offset <= %(start)s"
    ),
    "strictly more": _without(
        "(progress.lease < %(lease)s::bigint[] or progress.owner = %(owner)s)",
        "take",
        instead="true",
    ),
    "released": _without("progress.released\n", "take", instead="true\n"),
    "fenced release": _without(
        "\n  and progress.lease = %(lease)s::bigint[]\n  and progress.owner = %(owner)s", "release"
    ),
    "cached position": _trust_positions,
    "unclear commit": _believe_the_error,
}
