"""`sideline reprocess`: apply a range of a pipeline's topics again, exactly once."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from sideline import loading, settings, showing
from sideline.cli.output import Steps, console_err, json_option, print_json, print_table
from sideline.cli.run import Stop, watch
from sideline.errors import PartialError, SidelineError, UsageError

if TYPE_CHECKING:
    from sideline.ledger.runs import RunRow
    from sideline.pipeline import Pipeline
    from sideline.reprocessing import Asked, Plan

STAYS_OLD = (
    "Rows whose keys have later events that it had not come to show an old state, until the range "
    "is applied again to its end."
)
LAST_FAILS = "A row stays in an older state where the last event of its key fails and is left out."
LATER = "Nothing is changed yet: --execute does it."


@click.command()
@click.argument("target", metavar="APP:NAME")
@click.option(
    "--from",
    "start",
    metavar="WHERE",
    help="The first event: earliest, a time, or offsets like 0:120,1:90.",
)
@click.option(
    "--to",
    metavar="WHERE",
    help="Where to end: a time, or offsets; by default as far as the pipeline has come.",
)
@click.option("--include-damaged", is_flag=True, help="Try dead and discarded events, too.")
@click.option(
    "--repeat-effects", is_flag=True, help="Insert, Execute, Publish and calls may happen again."
)
@click.option("--skip-failures", is_flag=True, help="Leave out what fails, instead of stopping.")
@click.option(
    "--leave-old-states",
    is_flag=True,
    help="With --to: rows may stay as they were there, though later events had changed them.",
)
@click.option("--reason", metavar="TEXT", help="Why; kept in the audit.")
@click.option("--execute", is_flag=True, help="Do it; without it the plan is shown.")
@click.option("--resume", is_flag=True, help="Go on with the run that is not over.")
@click.option("--cancel", is_flag=True, help="Give that run up: what it applied stands.")
@click.option("--accept-loss", is_flag=True, help="Go on where Kafka lost events.")
@click.option("--master", metavar="URL", help="Spark master; local by default.")
@click.option(
    "--slots", type=click.IntRange(1), help="Tasks a round; cores or partitions by default."
)
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def reprocess(  # noqa: PLR0913 - one parameter an option
    *,
    target: str,
    start: str | None,
    to: str | None,
    include_damaged: bool,
    repeat_effects: bool,
    skip_failures: bool,
    leave_old_states: bool,
    reason: str | None,
    execute: bool,
    resume: bool,
    cancel: bool,
    accept_loss: bool,
    master: str | None,
    slots: int | None,
    kafka: str | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Apply a range of a pipeline's topics again, with the handler as it is now.

    APP is a module or a file, NAME the pipeline in it. Events that are known to be damaged, or
    that still wait, are left out.
    """
    _check(start, to, execute=execute, resume=resume, cancel=cancel)
    pipeline = loading.load(target)
    found = settings.load(kafka=kafka, database=database)
    from sideline.engine.positions import parse  # noqa: PLC0415 - imports confluent-kafka
    from sideline.ledger import audit  # noqa: PLC0415 - imports psycopg
    from sideline.reprocessing import Asked  # noqa: PLC0415

    why = None if reason is None else audit.reason(reason)
    desk = _Desk(pipeline, found, found.database_for(pipeline.sink), as_json=as_json)
    if cancel:
        desk.cancel(why)
        return
    if resume:
        run = desk.resume(why, skip_failures=skip_failures)
    else:
        if start is None:
            raise UsageError("nothing says where to begin.", hint="Write --from earliest.")
        asked = Asked(
            _start(start),
            None if to is None or to == "latest" else parse(to),
            include_damaged,
            repeat_effects,
            skip_failures,
            leave_old_states,
            why,
        )
        begun = desk.begin(asked, execute=execute)
        if begun is None:
            return
        run = begun
    desk.work(run, fresh=not resume, accept_loss=accept_loss, master=master, slots=slots)


def _check(start: str | None, to: str | None, *, execute: bool, resume: bool, cancel: bool) -> None:
    if (resume or cancel) and (start is not None or to is not None or execute):
        which = "--resume" if resume else "--cancel"
        message = f"{which} is for the run that is under way; it takes no range and no --execute."
        raise UsageError(message)
    if resume and cancel:
        raise UsageError("--resume and --cancel are two things.")


def _start(text: str) -> Any:  # noqa: ANN401 - see Start
    from sideline.engine.positions import parse  # noqa: PLC0415 - imports confluent-kafka

    if text == "latest":
        raise UsageError("--from latest leaves nothing.", hint="Write earliest, a time or offsets.")
    return parse(text)


class _Desk:
    """One call of the command: a pipeline, where its ledger is, and who wants to know."""

    def __init__(
        self, pipeline: Pipeline, found: settings.Settings, url: str, *, as_json: bool
    ) -> None:
        self._pipeline = pipeline
        self._settings = found
        self._url = url
        self._as_json = as_json

    def begin(self, asked: Asked, *, execute: bool) -> RunRow | None:
        """Show the plan; None: there is nothing more to do."""
        from sideline import reprocessing  # noqa: PLC0415 - imports psycopg
        from sideline.ledger import audit, reading, runs  # noqa: PLC0415
        from sideline.ledger.connection import reach  # noqa: PLC0415
        from sideline.topics.admin import Cluster  # noqa: PLC0415 - imports confluent-kafka

        cluster = Cluster(self._settings.kafka_client())
        with reading.understood(self._url), reach(self._url, role="reprocess") as connection:
            plan = reprocessing.look(connection, cluster, self._pipeline, asked)
            going = execute and plan.offsets > 0
            if not (self._as_json and going):
                self._show(plan, execute=execute)
            if not going:
                return None
            return runs.begin(connection, self._pipeline, plan.wish, audit.actor())

    def resume(self, reason: str | None, *, skip_failures: bool) -> RunRow:
        """The run that goes on."""
        from sideline import reprocessing  # noqa: PLC0415 - imports psycopg
        from sideline.ledger import audit, reading, runs  # noqa: PLC0415
        from sideline.ledger.connection import reach  # noqa: PLC0415

        with reading.understood(self._url), reach(self._url, role="reprocess") as connection:
            run = reprocessing.resumed(connection, self._pipeline)
            runs.resume(connection, run, audit.actor(), skip_failures=skip_failures, reason=reason)
            run = reprocessing.resumed(connection, self._pipeline)
        if run.alone and run.skip_failures:
            _speak(LAST_FAILS)
        return run

    def cancel(self, reason: str | None) -> None:
        """Give the run up."""
        from sideline.errors import NotFoundError  # noqa: PLC0415
        from sideline.ledger import audit, reading, runs  # noqa: PLC0415 - imports psycopg
        from sideline.ledger.connection import reach  # noqa: PLC0415

        with reading.understood(self._url), reach(self._url, role="reprocess") as connection:
            run = runs.under_way(connection, self._pipeline.name)
            if run is None:
                message = f"no run of pipeline {self._pipeline.name!r} is under way."
                raise NotFoundError(message, hint="`sideline status` shows what there is.")
            runs.cancel(connection, run, audit.actor(), reason)
        if self._as_json:
            print_json({"run": run.name, "state": "cancelled"})
        else:
            _speak(f"Run {run.name} is given up; what it applied stands.")
            if run.alone:
                _speak(STAYS_OLD)

    def work(
        self,
        run: RunRow,
        *,
        fresh: bool,
        accept_loss: bool,
        master: str | None,
        slots: int | None,
    ) -> None:
        """Run it on Spark to its end."""
        from sideline import again  # noqa: PLC0415
        from sideline.engine.running import Running  # noqa: PLC0415 - imports pyspark

        derived = again.derive(
            self._pipeline,
            run.name,
            include_damaged=run.include_damaged,
            repeat_effects=run.repeat_effects,
            skip_failures=run.skip_failures,
            guarded=not run.alone,
        )
        stop = Stop()
        with Steps() as steps:
            steps(run.name, "starting Spark")
            try:
                running = Running.begin(
                    derived,
                    once=True,
                    settings=_without_lag(self._settings),
                    master=master,
                    slots=slots,
                    accept_loss=accept_loss,
                    bounds=run.ends,
                )
            except BaseException:
                if fresh:
                    # It never began: nobody should have to wait for it.
                    self._give_up(run)
                raise
            stop.attach(running.stop)
            steps.done(f"{run.name} runs on Spark ({self._settings.kafka})", of=(run.name,))
            watch(running, steps, run.name, left=partial(_left, run))
        self._finish(run, running.status())

    def _give_up(self, run: RunRow) -> None:
        from sideline.ledger import audit, runs  # noqa: PLC0415 - imports psycopg
        from sideline.ledger.connection import reach  # noqa: PLC0415

        with suppress(SidelineError), reach(self._url, role="reprocess") as connection:
            runs.cancel(connection, run, audit.actor(), "it could not begin")

    def _finish(self, run: RunRow, status: dict[str, Any]) -> None:
        from sideline.ledger import audit, reading, runs  # noqa: PLC0415 - imports psycopg
        from sideline.ledger.connection import reach  # noqa: PLC0415

        with reading.understood(self._url), reach(self._url, role="reprocess") as connection:
            done = runs.finish(connection, run, audit.actor())
        if not done:
            message = f"run {run.name} was stopped before its end; what it applied stands."
            raise PartialError(message, hint="It goes on where it stood: --resume")
        if self._as_json:
            print_json({"run": run.name, "state": "done", **status})
            return
        counts = ", ".join(
            f"{status[what]:,} {what}"
            for what in ("consumed", "applied", "filtered", "skipped", "duplicate")
            if status[what] or what in {"consumed", "applied"}
        )
        _speak(f"Run {run.name} is done: {counts}.")
        if status["skipped"]:
            _speak(f"     why some were left out: sideline parked causes {run.name}")

    def _show(self, plan: Plan, *, execute: bool) -> None:
        if self._as_json:
            print_json({**plan.as_dict(), "executed": False})
            return
        print_table(
            ("partition", "from", "to", "offsets"),
            [(str(one.partition), one.first, one.beyond, one.offsets) for one in plan.ranges],
        )
        for line in _words(plan, execute=execute):
            _speak(line)


def _words(plan: Plan, *, execute: bool) -> list[str]:
    found = plan.as_dict()
    damaged, waiting = found["left_out"]["damaged"], found["left_out"]["waiting"]
    lines = [f"{plan.offsets:,} offsets of pipeline {plan.pipeline} would be applied again."]
    if damaged:
        lines.append(
            f"Left out: {damaged:,} events known to be damaged; --include-damaged tries them."
        )
    if waiting:
        lines.append(
            f"Left out: {waiting:,} events that wait ({plan.keys_aside:,} keys are aside); they are"
            " applied when they are released."
        )
    if plan.cut:
        lines.append("It ends where the pipeline itself stands: the rest is applied by it.")
    if plan.repeats:
        lines.append(f"Happens again: {', '.join(plan.repeats)}.")
    elif plan.declared is None and not plan.asked.repeat_effects:
        lines.append(
            "The pipeline declares no effects=: anything but Upsert and Delete stops the run."
        )
    lines += _dangers(plan)
    if not plan.offsets:
        lines.append("There is nothing to apply again.")
    elif not execute:
        lines.append(LATER)
    return lines


def _dangers(plan: Plan) -> list[str]:
    """What becomes of order, and of what fails."""
    fails = f"What fails {'is left out' if plan.asked.skip_failures else 'stops the run'}."
    across = ["Keys may live in several partitions: across them there is no order."]
    lines = across if plan.shared else []
    if plan.guarded:
        return ["Its writes are guarded, so the pipeline may run meanwhile.", *lines, fails]
    if plan.ages:
        lines.insert(0, "It ends early: rows whose keys had later events stay in an old state.")
    if plan.asked.skip_failures:
        fails += f" {LAST_FAILS}"
    waits = "Until it is over the pipeline itself waits, and its tables go through old states."
    return [waits, *lines, fails]


def _left(run: RunRow, status: dict[str, Any]) -> int:
    """How many offsets there are still to go."""
    here = {
        (part["topic"], part["partition"]): part["next_offset"] for part in status["partitions"]
    }
    return sum(max(0, end - here.get(spot, end)) for spot, end in run.ends.items())


def _without_lag(found: settings.Settings) -> settings.Settings:
    """Settings for a run: it is behind by nature, so lag is no reason for an alert."""
    alerting = dataclasses.replace(found.alerting, lag_seconds=None, lag_events=None)
    return dataclasses.replace(found, alerting=alerting)


def _speak(text: str) -> None:
    console_err.print(showing.words(text), markup=False, soft_wrap=True)
