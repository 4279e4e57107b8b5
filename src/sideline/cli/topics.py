"""`sideline topics`: what a pipeline's own topics have to be like."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from sideline import loading, settings, showing
from sideline.cli.choosing import database_of
from sideline.cli.output import console_err, json_option, print_json, print_table
from sideline.durations import seconds
from sideline.errors import CheckError, NotFoundError
from sideline.policies import RetryTopics
from sideline.topics.plans import PARTITIONS, Difference, Found, Plan, differences
from sideline.topics.plans import plan as planned

if TYPE_CHECKING:
    from sideline.ledger.resending import Lost
    from sideline.pipeline import Pipeline
    from sideline.topics.admin import Cluster

F = TypeVar("F", bound=Callable[..., Any])


class Case(NamedTuple):
    """A topic: what it should be, what it is, and what is between the two."""

    plan: Plan
    found: Found | None
    differences: list[Difference]

    def as_json(self) -> dict[str, Any]:
        """As ``--json`` shows it."""
        topic = self.plan.topic
        return {
            "topic": topic.name,
            "kind": topic.kind,
            "source": topic.source,
            "exists": self.found is not None,
            "settings": [
                {"name": one.name, "value": one.value, "why": one.why} for one in self.plan.all
            ],
            "differences": [
                {
                    "name": one.setting,
                    "is": one.is_,
                    "should": one.should,
                    "why": one.why,
                    "alterable": one.alterable,
                }
                for one in self.differences
                if self.found is not None
            ],
        }


class Made(NamedTuple):
    """What was done."""

    created: list[str]
    altered: list[str]
    left: list[Difference]
    """What is still not as it should be."""


@click.group(no_args_is_help=True)
def topics() -> None:
    """Stash, retry and dead-letter topics of a pipeline: what they have to be like, and why."""


def _target(command: F) -> F:
    options = (
        click.argument("target", metavar="APP:NAME"),
        click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@topics.command()
@_target
@json_option
def plan(*, target: str, kafka: str | None, as_json: bool) -> None:
    """Show every topic that the pipeline needs, its settings, and why. Changes nothing."""
    pipeline, cases, _ = _cases(target, kafka)
    if as_json:
        print_json({"pipeline": pipeline.name, "topics": [case.as_json() for case in cases]})
        return
    if not cases:
        _none(pipeline)
        return
    rows: list[tuple[str, ...]] = []
    for case in cases:
        wrong = {one.setting: one.is_ for one in case.differences}
        for one in case.plan.all:
            state = "missing" if case.found is None else "ok"
            if case.found is not None and one.name in wrong:
                state = f"is {wrong[one.name]}"
            rows.append((case.plan.topic.name, one.name, one.value, state, one.why))
    print_table(("topic", "setting", "value", "now", "why"), rows)


@topics.command()
@_target
@click.option("--alter", is_flag=True, help="Also mend topics that exist and differ.")
@json_option
def create(*, target: str, kafka: str | None, alter: bool, as_json: bool) -> None:
    """Create the topics that are missing; what exists is left alone without --alter."""
    pipeline, cases, cluster = _cases(target, kafka)
    made = Made([], [], [])
    for case in cases:
        _make(cluster, case, made, alter=alter)
    if as_json:
        left = [_difference(one) for one in made.left]
        print_json({"pipeline": pipeline.name, **made._asdict(), "left": left})
        return
    if not cases:
        _none(pipeline)
    for names, done in ((made.created, "created"), (made.altered, "altered")):
        for name in names:
            _speak(f"{name}: {done}.")
    for one in made.left:
        _speak(_words(one))
    if any(one.alterable for one in made.left):
        _speak("Topics that exist are left as they are: --alter mends them.")
    if cases and not any(made):
        _speak(f"All {len(cases)} topics are there, and as they should be.")


@topics.command()
@_target
@json_option
def check(*, target: str, kafka: str | None, as_json: bool) -> int:
    """Compare topics with their plan; exit 3 where they differ."""
    pipeline, cases, _ = _cases(target, kafka)
    wrong = [case for case in cases if case.differences]
    if as_json:
        print_json(
            {
                "pipeline": pipeline.name,
                "ok": not wrong,
                "topics": [case.as_json() for case in cases],
            }
        )
        return CheckError.exit_code if wrong else 0
    for case in wrong:
        if case.found is None:
            _speak(f"{case.plan.topic.name}: missing.")
        for one in case.differences if case.found is not None else ():
            _speak(_words(one))
    if wrong:
        _speak(f"Mend it: sideline topics create {target} --alter")
        return CheckError.exit_code
    if not cases:
        _none(pipeline)
    else:
        _speak(f"All {len(cases)} topics of {pipeline.name} are as they should be.")
    return 0


@topics.command()
@_target
@click.option("--database", metavar="URL", help="PostgreSQL.")
@click.option("--execute", is_flag=True, help="Do it; otherwise only what would be done is shown.")
@json_option
def resend(
    *, target: str, kafka: str | None, database: str | None, execute: bool, as_json: bool
) -> None:
    """Send copies again that are lost: their retry topic was deleted, or emptied.

    Their events wait for a turn that does not come. They are in the ledger, so that nothing of
    them is lost. Where the pipeline has no retry topics any more, they are dead instead.
    """
    from sideline.ledger import audit, reading, resending  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.topics.admin import Cluster  # noqa: PLC0415 - imports confluent-kafka

    pipeline = loading.load(target)
    found = settings.load(kafka=kafka, database=database)
    url = database_of(database, pipeline)
    with reading.understood(url), reach(url, role="resend") as connection:
        reading.waiting(connection, pipeline.name)
        connection.rollback()
        lost = resending.find(connection, Cluster(found.kafka_client()), pipeline.name)
        sent = dead = 0
        if execute:
            sent, dead = resending.resend(connection, pipeline, lost, actor=audit.actor())
    if as_json:
        counts = {"lost": len(lost.events), "unsent": lost.unsent, "sent": sent, "dead": dead}
        about = {"pipeline": pipeline.name, "executed": execute, "missing": sorted(lost.missing)}
        print_json(about | counts)
        return
    for line in _resent(pipeline, lost, sent, dead, execute=execute):
        _speak(line)


def _resent(pipeline: Pipeline, lost: Lost, sent: int, dead: int, *, execute: bool) -> list[str]:
    if lost.unsent:
        return [f"{lost.unsent:,} records of {pipeline.name} are not sent yet: let it run first."]
    lines = [f"{topic}: does not exist." for topic in sorted(lost.missing)]
    if not lost.events:
        return [*lines, f"No event of {pipeline.name} waits for a copy that is lost."]
    lines.append(f"{len(lost.events):,} events wait for copies that are lost.")
    if not execute:
        return [*lines, "Nothing is changed yet: --execute does it."]
    if sent:
        lines.append(f"{sent:,} copies are in the outbox: the pipeline sends them.")
    if dead:
        lines.append(f"{dead:,} events are dead: the pipeline has no retry topics.")
    return lines


def _cases(target: str, kafka: str | None) -> tuple[Pipeline, list[Case], Cluster]:
    from sideline.topics.admin import Cluster  # noqa: PLC0415 - imports confluent-kafka

    pipeline = loading.load(target)
    cluster = Cluster(settings.load(kafka=kafka).kafka_client())
    delays = pipeline.on_failure.delays if isinstance(pipeline.on_failure, RetryTopics) else ()
    delays_ms = [int(seconds(delay) * 1000) for delay in delays]
    own = pipeline.own_topics
    brokers = cluster.brokers() if own else 0
    sources: dict[str, Found] = {}
    cases = []
    for topic in own:
        if topic.source not in sources:
            source = cluster.describe(topic.source)
            if source is None:
                message = f"topic {topic.source!r} does not exist at {cluster.bootstrap}."
                hint = "Its partitions decide those of the others: create it first."
                raise NotFoundError(message, hint=hint)
            sources[topic.source] = source
        wanted = planned(topic, sources[topic.source], delays_ms=delays_ms, brokers=brokers)
        found = cluster.describe(topic.name)
        cases.append(Case(wanted, found, differences(wanted, found)))
    return pipeline, cases, cluster


def _make(cluster: Cluster, case: Case, made: Made, *, alter: bool) -> None:
    """Create one topic, or mend it."""
    name = case.plan.topic.name
    if case.found is None and cluster.create(case.plan):
        made.created.append(name)
        cluster.await_change(name, lambda found: found is not None)
        return
    if case.found is None:
        # Somebody made it just now.
        cluster.await_change(name, lambda found: found is not None)
    found = case.found or cluster.describe(name)
    wrong = differences(case.plan, found)
    mend = [one for one in wrong if one.alterable] if alter else []
    if mend:
        _alter(cluster, name, mend)
        made.altered.append(name)
        cluster.await_change(
            name, lambda now: not any(one in differences(case.plan, now) for one in mend)
        )
    made.left.extend(one for one in wrong if one not in mend)


def _alter(cluster: Cluster, name: str, mend: list[Difference]) -> None:
    partitions = next((int(one.should) for one in mend if one.setting == PARTITIONS), None)
    cluster.alter(
        name, {one.setting: one.should for one in mend if one.setting != PARTITIONS}, partitions
    )


def _difference(one: Difference) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "name": one.setting,
        "is": one.is_,
        "should": one.should,
        "why": one.why,
        "alterable": one.alterable,
    }


def _words(one: Difference) -> str:
    by_hand = "" if one.alterable else " (by hand: it cannot be altered here)"
    return f"{one.topic}: {one.setting} is {one.is_}, should be {one.should}{by_hand}: {one.why}"


def _none(pipeline: Pipeline) -> None:
    _speak(f"Pipeline {pipeline.name} needs no topics of its own.")


def _speak(text: str) -> None:
    console_err.print(showing.words(text), markup=False, soft_wrap=True)
