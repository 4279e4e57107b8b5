"""Plans, trials and operations, for people and for programs: lines and JSON made of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sideline import showing
from sideline.cli.parked_views import key_cell
from sideline.selections import Plan, Sample

if TYPE_CHECKING:
    from sideline.operations import Items, Operation
    from sideline.trial import Trial

MESSAGE_CHARACTERS = 120
CAUSES_SHOWN = 10
MEANINGS = {
    "release": "Events that failed are handled again, then what follows them, in order.",
    "discard": "Nobody handles them any more; what follows them can be released.",
    "restore": "They wait again, in their old places.",
}


def plan_lines(
    plan: Plan, *, execute: bool, reason: str | None, how: Sequence[str] = ()
) -> list[str]:
    """What would be done, as a careful person wants to read it; ``how``: the other options."""
    selection = plan.selection
    head = f"{selection.kind} {selection.pipeline}: {amount(plan)}"
    lines = [showing.words(head)]
    if plan.items:
        since = showing.moment(plan.oldest) if plan.oldest else "?"
        lines.append(f"  the oldest since {since}. {MEANINGS[selection.kind]}")
    lines += _cause_lines(plan)
    lines += _sample_lines(plan)
    lines += _version_lines(plan)
    if reason:
        lines.append(f"  reason: {showing.words(reason)}")
    lines += [f"  {line}" for line in _warnings(plan)]
    if execute or not plan.items:
        return lines
    more = ("--reason", reason) if reason else ()
    command = selection.command(*how, *more, "--plan", str(plan.name), "--execute")
    return [*lines, "Nothing is changed yet. Exactly this:", f"  {command}"]


def amount(plan: Plan) -> str:
    """How much a plan holds."""
    if not plan.items:
        return "nothing"
    if plan.selection.dead:
        # With a key or without: nothing waits behind it, and it goes by itself.
        return _count(plan.events, "dead event")
    parts = []
    if plan.keys:
        parts.append(_count(plan.keys, "key"))
    if plan.alone:
        parts.append(_count(plan.alone, "event without a key", "events without a key"))
    events = f"{_count(plan.events, 'event')} ({plan.failed:,} failed"
    followers = f", {plan.followers:,} behind them)" if plan.followers else ")"
    return ", ".join((*parts, events + followers))


def _cause_lines(plan: Plan) -> list[str]:
    if not plan.causes:
        return []
    lines = ["  why they failed"]
    for cause in plan.causes[:CAUSES_SHOWN]:
        message = showing.short(cause.message, MESSAGE_CHARACTERS)
        place = f" at {showing.words(cause.place)}" if cause.place else ""
        lines += [
            f"    {cause.events:>9,}  {showing.words(cause.error)}{place}",
            f"               {message} (cause {showing.words(cause.fingerprint)})",
        ]
    left = plan.causes[CAUSES_SHOWN:]
    if left:
        lines.append(f"    {sum(cause.events for cause in left):>9,}  {len(left):,} other causes")
    return lines


def _sample_lines(plan: Plan) -> list[str]:
    if not plan.sample:
        return []
    return ["  the first of them", *(f"    {_sample(one)}" for one in plan.sample)]


def _sample(one: Sample) -> str:
    error = "" if one.error is None else f"{one.error}: {one.message}"
    why = showing.short(error, MESSAGE_CHARACTERS) or (one.why or "")
    more = f" and {one.events - 1:,} behind it" if one.events > 1 else ""
    return f"{key_cell(one.key)}  {one.id}{more}  {showing.moment(one.at)}  {why}"


def _version_lines(plan: Plan) -> list[str]:
    if plan.selection.kind != "release" or not plan.versions:
        return []
    failed = ", ".join(
        f"{showing.words(version)} ({count:,})"
        for version, count in sorted(plan.versions.items(), key=lambda each: -each[1])
    )
    now = "none has run yet" if plan.version is None else f"{showing.words(plan.version)}"
    tense = "runs now" if plan.running else "ran last"
    return [f"  handler: failed in version {failed}; {tense}: {now}"]


def _warnings(plan: Plan) -> list[str]:
    found = []
    if plan.selection.kind == "release" and plan.failed_here:
        found.append(
            f"Careful: {plan.failed_here:,} of them failed in this very version of the handler. "
            "Deploy the fix first, or try with --trial."
        )
    if plan.new:
        what = "dead event" if plan.selection.dead else "key"
        found.append(f"{_count(plan.new, what)} since that plan: new, and not in it.")
    if plan.late:
        found.append(
            f"{_count(plan.late, 'event')} cannot be put back: the key has rejoined, or what "
            "stood behind is applied."
        )
    if plan.apart:
        found.append(
            f"{_count(plan.apart, 'imported event')} cannot be released: this pipeline does not "
            "read where it is kept, or depends on order. `sideline discard --dead` gives it up."
        )
    if plan.paused:
        found.append(
            f"The pipeline is paused: nothing happens before `sideline resume "
            f"{plan.selection.pipeline}`."
        )
    return found


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The same for programs."""
    return {
        "kind": plan.selection.kind,
        "pipeline": plan.selection.pipeline,
        "selection": plan.selection.as_json(),
        "plan": str(plan.name),
        "made_at": plan.name.boundary,
        "items": plan.items,
        "keys": plan.keys,
        "alone": plan.alone,
        "events": plan.events,
        "failed": plan.failed,
        "followers": plan.followers,
        "oldest": plan.oldest,
        "causes": [cause._asdict() for cause in plan.causes],
        "failed_in": plan.versions,
        "handler_version": plan.version,
        "failed_in_this_version": plan.failed_here,
        "running": plan.running,
        "paused": plan.paused,
        "new": plan.new,
        "late": plan.late,
        "apart": plan.apart,
        "sample": [
            one._asdict() | {"key": showing.as_json(one.key), "id": one.id} for one in plan.sample
        ],
    }


# Trials


def trial_lines(trial: Trial, plan: Plan) -> list[str]:
    """What would become of the events."""
    lines = [
        (
            f"  tried {trial.tried:,} of {plan.events:,} events of {_count(trial.keys, 'key')}, "
            f"and took everything back:"
        ),
        f"    would be applied {trial.applied + trial.filtered:,}"
        + (f" ({trial.filtered:,} without effects)" if trial.filtered else "")
        + f", would fail {trial.failed:,}, wait behind those {trial.behind:,}",
    ]
    if trial.elsewhere:
        lines.append(f"    not tried, bytes of theirs are gone: {trial.elsewhere:,}")
    fates = {"parked": "", "waits": " (would be tried again)", "stops": " (would stop the run)"}
    for one in trial.mishaps:
        why = showing.short(f"{one.error}: {one.message}", MESSAGE_CHARACTERS)
        lines.append(f"    {one.id}  {why}{fates.get(one.fate, '')}")
    return lines


def trial_json(trial: Trial) -> dict[str, Any]:
    """The same for programs."""
    found = dataclasses.asdict(trial)
    return found | {"mishaps": [one._asdict() for one in trial.mishaps]}


# Operations


def progress(operation: Operation) -> str:
    """How far it is, in a few words."""
    match operation.kind:
        case "discard":
            done = f"{operation.discarded:,} discarded"
        case "restore":
            done = f"{operation.restored:,} restored"
        case _:
            done = f"{operation.applied:,} applied"
            if operation.failed:
                done += f", {operation.failed:,} failed again"
    return done


def operation_lines(operation: Operation, items: Items, *, running: bool) -> list[str]:
    """Everything about an operation."""
    step = operation.selection.get("step")
    of = f", step {step} of {operation.selection.get('of')}" if step else ""
    begun = f"{showing.moment(operation.created_at)} by {showing.words(operation.actor)}"
    lines = [
        (
            f"operation {operation.id}  {operation.kind} {showing.words(operation.pipeline)}: "
            f"{operation.state}{of}"
        ),
        f"  begun      {begun}",
        f"  chosen     {chosen(operation)}",
        (
            f"  frozen     {operation.items:,} items, {operation.events:,} failed events, "
            f"plan {operation.plan}"
        ),
        f"  events     {progress(operation)}, of {operation.total:,}",
        (
            f"  items      {items.done:,} done, {items.failed:,} back aside, {items.gone:,} gone "
            f"before, {items.waiting:,} wait"
        ),
    ]
    if operation.rate is not None:
        lines.append(f"  rate       at most {operation.rate:,g} events/s")
    if operation.kind == "release":
        lines.append(f"  stops      when failures reach {operation.stop_at:.0%} of at least 10")
    if operation.reason:
        lines.append(f"  reason     {showing.words(operation.reason)}")
    if operation.note:
        lines.append(f"  note       {showing.words(operation.note)}")
    if operation.ended_at:
        lines.append(f"  ended      {showing.moment(operation.ended_at)}")
    if operation.state == "running" and not running:
        lines.append("  no driver runs: nothing happens until the pipeline does")
    return lines


def chosen(operation: Operation) -> str:
    """What was asked for, in a line."""
    asked = {
        name: value
        for name, value in operation.selection.items()
        if name not in {"waiting", "step", "of"}
    }
    if asked.pop("all", False):
        return "all"
    parts = []
    for name, value in asked.items():
        values = value if isinstance(value, list) else [value]
        shown = ", ".join(_plain(one) for one in values[:5])
        more = f" and {len(values) - 5:,} more" if len(values) > 5 else ""  # noqa: PLR2004
        parts.append(f"{name} {shown}{more}")
    return showing.words("; ".join(parts))


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return str(value.get("text", f"0x{value.get('hex', '')}"))
    return str(value)


def operation_json(operation: Operation, items: Items | None = None) -> dict[str, Any]:
    """The same for programs."""
    found = dataclasses.asdict(operation) | {"total": operation.total}
    return found if items is None else found | {"item_states": items._asdict()}
