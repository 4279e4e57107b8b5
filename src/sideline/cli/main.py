"""The command `sideline`: finds the command that was asked for, and translates what it raises.

Only click is imported here: every command lives in a module of its own that is imported when
the command runs, so that `sideline --help` and shell completion answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import click
from click.shell_completion import CompletionItem, shell_complete

from sideline._version import __version__
from sideline.errors import SidelineError, UsageError, is_interrupt
from sideline.masking import mask_text
from sideline.showing import json_text, paragraph

PROGRAM = "sideline"
COMPLETION_VARIABLE = "_SIDELINE_COMPLETE"

EXIT_UNEXPECTED = 1
EXIT_INTERRUPTED = 130
# 128 + SIGPIPE, as if the signal had ended us: whoever read our output has gone.
EXIT_READER_GONE = 141
# By number: sys.stdout may be anything by the time something goes wrong.
_OUTPUT = (1, 2)


class Entry(NamedTuple):
    """Where a command lives, and what the list of commands says about it."""

    place: str
    help: str


COMMANDS: dict[str, Entry] = {
    "demo": Entry("sideline.cli.demo:demo", "The story, on an embedded stack, in one go."),
    "stack": Entry("sideline.cli.stack:stack", "Embedded Kafka and PostgreSQL: up, down, status."),
    "run": Entry("sideline.cli.run:run", "Run a pipeline on Spark."),
    "status": Entry("sideline.cli.status:status", "Progress, lag and state of pipelines."),
    "parked": Entry("sideline.cli.parked:parked", "What waits, and why: keys, causes, events."),
    "park": Entry("sideline.cli.park:park", "Set aside by hand what a partition waits for."),
    "release": Entry("sideline.cli.release:release", "Handle again what waits, in order."),
    "discard": Entry("sideline.cli.discard:discard", "Give up on events, with a reason."),
    "restore": Entry("sideline.cli.discard:restore", "Put discarded events back."),
    "ops": Entry(
        "sideline.cli.ops:ops", "Releases and the like: list, show, pause, resume, cancel."
    ),
    "reprocess": Entry("sideline.cli.reprocess:reprocess", "Apply a range of topics again."),
    "alerts": Entry("sideline.cli.alerts:alerts", "What somebody should know."),
    "pause": Entry("sideline.cli.pause:pause", "Keep a pipeline, or a partition of it, waiting."),
    "resume": Entry("sideline.cli.pause:resume", "Let it go on."),
    "audit": Entry("sideline.cli.audit:audit", "Who changed what, when and why."),
    "publish": Entry("sideline.cli.publish:publish", "JSON lines into a topic, none lost."),
    "topics": Entry("sideline.cli.topics:topics", "A pipeline's own topics: plan, create, check."),
    "clean": Entry("sideline.cli.clean:clean", "Take away what is over and old."),
    "erase": Entry("sideline.cli.erase:erase", "The bytes of a key's events, gone for good."),
    "forget": Entry("sideline.cli.forget:forget", "Everything of a pipeline that is no more."),
    "purge": Entry("sideline.cli.purge:purge", "Empty dead-letter and stash topics."),
    "classify": Entry("sideline.cli.classify:classify", "What would happen to an exception."),
    "migrate": Entry("sideline.cli.migrate:migrate", "Create or upgrade the ledger's schema."),
    "config": Entry("sideline.cli.config:config", "What is configured, and where it came from."),
    "completion": Entry("sideline.cli.completion:completion", "Shell completion."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names, in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the command."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or guess what was meant."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            guess = f" Did you mean '{near[0]}'?" if near else ""
            raise click.UsageError(f"there is no command '{name}'.{guess}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names from the table, without importing the commands."""
        names = [
            CompletionItem(name, help=entry.help)
            for name, entry in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks; may stand anywhere.")
def cli(debug: bool) -> None:  # noqa: FBT001 - taken out of the arguments before click
    """Apply Kafka events with PySpark, in order per key and exactly once in effect.

    A failing key steps aside, everything else keeps flowing.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; the exit code is returned."""
    if COMPLETION_VARIABLE in os.environ:
        return shell_complete(
            cli, {}, PROGRAM, COMPLETION_VARIABLE, os.environ[COMPLETION_VARIABLE]
        )
    ours, rest = _split(arguments)
    debug, as_json = "--debug" in ours, "--json" in ours
    ours = [argument for argument in ours if argument != "--debug"]
    try:
        return _invoke([*ours, *rest])
    except BaseException as error:  # noqa: BLE001 - the one place that translates; SystemExit passes
        return _translate(error, debug=debug, as_json=as_json)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before ``--`` can be a flag of ours; what stands behind it cannot."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end:])


def _invoke(arguments: list[str]) -> int:
    with cli.make_context(PROGRAM, arguments) as context:
        result: Any = cli.invoke(context)
    # Here, where a reader that has gone is still an ordinary error.
    sys.stdout.flush()
    return result if type(result) is int else 0


def _translate(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Say what happened to the person who asked, and choose the exit code."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code
        case SystemExit():
            raise error
        case _ if is_interrupt(error) or isinstance(error, click.Abort):
            _say("sideline: interrupted.")
            return EXIT_INTERRUPTED
        case BrokenPipeError() if _reader_gone():
            _forget_output()
            return EXIT_READER_GONE
        case click.exceptions.NoArgsIsHelpError():
            _say(error.format_message())
            return UsageError.exit_code
        case click.ClickException():
            error = _usage_error(error)
        case SidelineError():
            pass
        case _:
            return _unexpected(error, debug=debug, as_json=as_json)
    if debug:
        _say(_traceback(error))
    _report(error, as_json=as_json)
    return error.exit_code


def _usage_error(error: click.ClickException) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else PROGRAM
    message = error.format_message()
    return UsageError(message[:1].lower() + message[1:], hint=f"See `{path} --help`.")


def _unexpected(error: BaseException, *, debug: bool, as_json: bool) -> int:
    if debug:
        _say(_traceback(error))
    # The first line only: some exceptions bring a page along.
    first_line = (str(error).strip() or "no message").splitlines()[0]
    message = f"unexpected {type(error).__name__}: {mask_text(first_line)}"
    hint = None if debug else "Run it again with --debug to see where, and report it."
    _report(SidelineError(message, hint=hint), as_json=as_json)
    return EXIT_UNEXPECTED


def _report(error: SidelineError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(json.dumps(error.as_dict(), ensure_ascii=False)))
        return
    _say(f"sideline: {error.message}")
    if error.hint:
        _say("\n".join(f"  {line}" for line in error.hint.splitlines()))


def _traceback(error: BaseException) -> str:
    return mask_text("".join(traceback.format_exception(error)).rstrip())


def _say(text: str) -> None:
    # A message may quote an event's bytes: a terminal must not obey them.
    click.echo(paragraph(text), err=True)


def _reader_gone() -> bool:
    """Whether stdout or stderr is the pipe that broke; a socket's broken pipe is an error."""
    poll = select.poll()
    for descriptor in _OUTPUT:
        poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _forget_output() -> None:
    """Let the interpreter's own flush at exit find nothing to complain about."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _OUTPUT:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
