"""What a pipeline's own topics are called (pure): stash, retry and dead-letter topics.

They belong to a consumer group, not to the source topic: two groups on one topic never meet.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from sideline.errors import ConfigurationError, RefusedError

Kind = Literal["stash", "retry", "dead-letter"]

LONGEST_NAME = 249
_LEGAL = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_FIELDS = frozenset({"topic", "group", "n"})


@dataclasses.dataclass(frozen=True, slots=True)
class TopicNames:
    """Patterns for the names of a pipeline's own topics.

    ``{topic}`` is the source topic, ``{group}`` the pipeline, ``{n}`` the number of the retry.
    """

    stash: str = "{topic}.{group}.stash"
    retry: str = "{topic}.{group}.retry.{n}"
    dead_letter: str = "{topic}.{group}.dlq"

    def __post_init__(self) -> None:
        for what, pattern in (
            ("stash", self.stash),
            ("retry", self.retry),
            ("dead_letter", self.dead_letter),
        ):
            _check_pattern(what, pattern)

    def stash_of(self, topic: str, group: str) -> str:
        """Where the bytes of parked events are kept."""
        return _fill(self.stash, topic, group, 0)

    def retry_of(self, topic: str, group: str, n: int) -> str:
        """Where an event waits before its ``n``-th retry; the first one is 1."""
        return _fill(self.retry, topic, group, n)

    def dead_letter_of(self, topic: str, group: str) -> str:
        """Where copies of events go that nobody tries any more."""
        return _fill(self.dead_letter, topic, group, 0)


class OwnTopic(NamedTuple):
    """A topic that a pipeline needs for itself."""

    name: str
    kind: Kind
    source: str
    """The topic whose events it holds."""
    n: int = 0
    """Which retry; 0 for the other kinds."""


def own_topics(  # noqa: PLR0913 - what a pipeline declares, by keyword
    names: TopicNames,
    group: str,
    sources: Sequence[str],
    *,
    stash: bool = False,
    retries: int = 0,
    dead_letter: bool = False,
) -> tuple[OwnTopic, ...]:
    """Every topic that the pipeline needs for itself; ConfigurationError if names clash."""
    own = tuple(_own(names, group, sources, stash=stash, retries=retries, dead_letter=dead_letter))
    taken = {_broker_sees(source): source for source in sources}
    for topic in own:
        other = taken.get(_broker_sees(topic.name))
        if other in sources:
            alike = "" if other == topic.name else f" (to the broker the same as {other!r})"
            _refuse(
                group, f"its {topic.kind} topic would be {topic.name!r}{alike}, one of its sources"
            )
        if other is not None:
            _refuse(group, f"two of its own topics would be {other!r} and {topic.name!r}")
        taken[_broker_sees(topic.name)] = topic.name
    return own


def refuse_shared(group: str, own: Iterable[OwnTopic], others: Mapping[str, Iterable[str]]) -> None:
    """RefusedError if another pipeline has a topic of its own by one of these names (F11).

    ``others``: pipeline to its own topics. ``a.b`` of group ``c`` and ``a`` of group ``b.c`` meet
    in one name, so patterns alone cannot keep two groups apart.
    """
    theirs = {
        _broker_sees(name): (pipeline, name)
        for pipeline, topics in others.items()
        if pipeline != group
        for name in topics
    }
    for topic in own:
        taken = theirs.get(_broker_sees(topic.name))
        if taken is not None:
            pipeline, name = taken
            message = (
                f"pipeline {group!r}: its {topic.kind} topic {topic.name!r} is already a topic of "
                f"pipeline {pipeline!r}"
            )
            message += "." if name == topic.name else f" ({name!r} differs in '.' and '_' only)."
            hint = "Give it names of its own: names=TopicNames(...)."
            raise RefusedError(message, hint=hint)


def is_legal(name: str) -> bool:
    """Whether Kafka takes this as the name of a topic."""
    legal = len(name) <= LONGEST_NAME and _LEGAL.fullmatch(name) is not None
    return legal and name not in {".", ".."}


def _own(  # noqa: PLR0913 - see own_topics
    names: TopicNames,
    group: str,
    sources: Sequence[str],
    *,
    stash: bool,
    retries: int,
    dead_letter: bool,
) -> Iterator[OwnTopic]:
    for source in sources:
        if stash:
            yield OwnTopic(names.stash_of(source, group), "stash", source)
        for n in range(1, retries + 1):
            yield OwnTopic(names.retry_of(source, group, n), "retry", source, n)
        if dead_letter:
            yield OwnTopic(names.dead_letter_of(source, group), "dead-letter", source)


def _broker_sees(name: str) -> str:
    """Names that differ in these two only are one in its metrics: it refuses the second."""
    return name.replace(".", "_")


@lru_cache(maxsize=1024)
def _fill(pattern: str, topic: str, group: str, n: int) -> str:
    name = pattern.format(topic=topic, group=group, n=n)
    if not is_legal(name):
        reason = (
            f"has {len(name)} characters, and Kafka takes {LONGEST_NAME}"
            if len(name) > LONGEST_NAME
            else "is not a name that Kafka takes"
        )
        _refuse(group, f"the topic {name!r}, made by the pattern {pattern!r}, {reason}")
    return name


def _check_pattern(what: str, pattern: str) -> None:
    hint = f'Write it like TopicNames({what}="{{topic}}.{{group}}.{what.replace("_", "-")}").'
    try:
        parts = list(string.Formatter().parse(pattern))
    except (TypeError, ValueError):
        parts = [("", "?", "", None)]
    fields = {field for _, field, form, conversion in parts if field is not None}
    plain = all(not form and not conversion for _, field, form, conversion in parts)
    if not plain or not fields <= _FIELDS or ("n" in fields and what != "retry"):
        allowed = "{topic}, {group}" + (" and {n}" if what == "retry" else "")
        message = f"the pattern {pattern!r} for {what} topics may hold {allowed}, nothing else."
        raise ConfigurationError(message, hint=hint)
    if "group" not in fields:
        message = f"the pattern {pattern!r} for {what} topics lacks {{group}}: groups would share."
        raise ConfigurationError(message, hint=hint)


def _refuse(group: str, why: str) -> None:
    hint = "Choose another pattern: names=TopicNames(...)."
    raise ConfigurationError(f"pipeline {group!r}: {why}.", hint=hint)
