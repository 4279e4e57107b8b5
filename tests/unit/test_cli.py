"""The command: what it imports, how it fails, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from sideline import errors
from sideline.cli import main


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run a command line in an empty directory; the exit code, stdout and stderr come back."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("SIDELINE_") and not name.startswith("SIDELINE_TEST_"):
            monkeypatch.delenv(name)
    # Whatever the terminal is like from which the tests are run.
    monkeypatch.setenv("COLUMNS", "80")

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main.run(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


@pytest.fixture
def failing(monkeypatch):
    """Put a command `fail` into the table that raises what it is told to."""

    def failing(error: BaseException | None, result: object = None) -> None:
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        def fail(*, as_json):
            if error is not None:
                raise error
            return result

        monkeypatch.setattr(sys.modules[__name__], "fail", fail, raising=False)
        entry = main.Entry(f"{__name__}:fail", "Fail.")
        monkeypatch.setitem(main.COMMANDS, "fail", entry)

    return failing


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


HEAVY = ("pyspark", "psycopg", "confluent_kafka", "rich", "sideline.engine", "sideline.stack")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"]])
def test_help_imports_nothing_heavy(arguments):
    """`sideline --help` answers without pyspark, psycopg or confluent_kafka (E1)."""
    code = (
        "import sys\n"
        "from sideline.cli import main\n"
        "main.run(sys.argv[1:])\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = run_python(code, *arguments)
    assert done.returncode == 0, done.stderr


def test_completion_imports_nothing_heavy():
    """The tab key does not wait for Spark (E1)."""
    code = (
        "import os, sys\n"
        "os.environ.update(_SIDELINE_COMPLETE='bash_complete', COMP_WORDS='sideline ', "
        "COMP_CWORD='1')\n"
        "from sideline.cli import main\n"
        "main.run([])\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert {line.split(",")[1] for line in done.stdout.split()} == set(main.COMMANDS)


@pytest.mark.parametrize(("shell", "expected"), [("zsh", "compdef"), ("fish", "complete")])
def test_completion_scripts_are_printed(command, shell, expected):
    """Each shell gets a script that asks sideline itself (E1)."""
    code, out, err = command("completion", shell)
    assert (code, err) == (0, "")
    assert main.COMPLETION_VARIABLE in out
    assert expected in out


def test_version_is_printed(command):
    """`--version` says program and version."""
    assert command("--version") == (0, f"sideline {main.__version__}\n", "")


def test_help_lists_every_command(command):
    """A newcomer sees every command with a line on what it does."""
    code, out, _ = command("--help")
    assert code == 0
    for name, entry in main.COMMANDS.items():
        assert name in out
        assert entry.help.split(":")[0] in out


def test_bare_command_shows_help_and_is_an_error(command):
    """A script that forgot its command must not pass for a success."""
    code, out, err = command()
    assert (code, out) == (2, "")
    assert "Commands:" in err


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_command_of_the_table_exists(command, name):
    """What the help lists can be run (E1)."""
    code, out, err = command(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: sideline {name}")


def test_unknown_command_is_guessed(command):
    """A typo costs one line, not a search in the help."""
    code, out, err = command("stauts")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "sideline: there is no command 'stauts'. Did you mean 'status'?",
        "  See `sideline --help`.",
    ]


def test_usage_errors_exit_2_with_one_sentence(command):
    """Click's own errors look like ours."""
    code, out, err = command("config", "show", "--orign")
    assert (code, out) == (2, "")
    assert err.startswith("sideline: no such option")
    assert err.endswith("  See `sideline config show --help`.\n")
    assert len(err.splitlines()) == 2


def error_classes() -> list[type[errors.SidelineError]]:
    found, waiting = [], [errors.SidelineError]
    while waiting:
        cls = waiting.pop()
        found.append(cls)
        waiting += cls.__subclasses__()
    return sorted(set(found), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", error_classes())
def test_every_error_of_ours_is_a_sentence_a_next_step_and_its_exit_code(command, failing, cls):
    """What the error tree says is what the shell sees (E1)."""
    error = cls("it broke.", hint="Mend it.")
    failing(error)
    assert command("fail") == (cls.exit_code, "", "sideline: it broke.\n  Mend it.\n")


def test_errors_are_json_when_json_was_asked_for(command, failing):
    """A program that reads JSON gets JSON also when it goes wrong (E1)."""
    failing(errors.NotFoundError("there is no pipeline 'x'.", hint="See `sideline status`."))
    code, out, err = command("fail", "--json")
    assert (code, err) == (4, "")
    assert json.loads(out) == {
        "error": "not-found",
        "message": "there is no pipeline 'x'.",
        "hint": "See `sideline status`.",
    }


def test_usage_errors_are_json_when_json_was_asked_for(command):
    """Also when the command line itself is wrong."""
    code, out, _ = command("config", "show", "--json", "--nope")
    assert code == 2
    assert json.loads(out)["error"] == "usage"


def test_unexpected_errors_are_one_line_and_point_to_debug(command, failing):
    """A bug of ours is no wall of text."""
    failing(ValueError("bad\nand a page more"))
    code, out, err = command("fail")
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == "sideline: unexpected ValueError: bad"
    assert "--debug" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("place", [0, 1])
def test_debug_shows_the_traceback_wherever_it_stands(command, failing, place):
    """`--debug` may come before or after the command."""
    failing(ValueError("bad"))
    arguments = ["fail"]
    arguments.insert(place, "--debug")
    code, _, err = command(*arguments)
    assert code == 1
    assert "Traceback" in err
    assert "ValueError: bad" in err


def test_no_password_in_an_error_or_a_traceback(command, failing):
    """An exception that quotes a URL does not betray its password."""
    failing(ValueError("cannot reach postgresql://zoey:hunter2@db/users"))
    for arguments in (["fail"], ["fail", "--debug"], ["fail", "--json"]):
        _, out, err = command(*arguments)
        assert "hunter2" not in out + err
        assert "zoey:***@db" in out + err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interrupt_exits_130(command, failing, error):
    """Ctrl-C is said in a word and seen by the shell."""
    failing(error)
    assert command("fail") == (130, "", "sideline: interrupted.\n")


def test_broken_pipe_of_a_socket_is_an_error(command, failing):
    """Only a reader of ours that has gone is nobody's fault."""
    failing(BrokenPipeError(32, "Broken pipe"))
    code, _, err = command("fail")
    assert code == 1
    assert "BrokenPipeError" in err


@pytest.mark.parametrize(("result", "expected"), [(None, 0), (3, 3), (True, 0), ("x", 0)])
def test_a_command_may_return_its_exit_code(command, failing, result, expected):
    """Whole numbers are exit codes, anything else is success."""
    failing(None, result)
    assert command("fail")[0] == expected


def test_reader_that_has_gone_ends_the_command_without_a_word():
    """`sideline ... | head` prints no traceback."""
    read, write = os.pipe()
    os.close(read)
    code = "from sideline.cli import main; main.main(['--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (main.EXIT_READER_GONE, b"")


def test_real_interrupt_exits_130():
    """SIGINT from a terminal reaches the shell as 130."""
    code = (
        "import sys, time, types, click\n"
        "from sideline.cli import main\n"
        "@click.command()\n"
        "def wait():\n"
        "    print('ready', flush=True)\n"
        # Not signal.pause(): the signal may come right before it.
        "    while True:\n"
        "        time.sleep(0.1)\n"
        "sys.modules['waiting'] = types.SimpleNamespace(wait=wait)\n"
        "main.COMMANDS['wait'] = main.Entry('waiting:wait', 'Wait.')\n"
        "main.main(['wait'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


def test_module_can_be_run():
    """`python -m sideline` is the same command, for environments without scripts on the PATH."""
    done = subprocess.run(
        [sys.executable, "-m", "sideline", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"sideline {main.__version__}\n"


def test_config_show_masks_and_names_origins(command, monkeypatch, tmp_path):
    """`config show --origin` says what counts and why, without passwords (E1)."""
    Path(tmp_path / "sideline.toml").write_text('kafka = "broker:9092"\n', "utf-8")
    monkeypatch.setenv("SIDELINE_DATABASE", "postgresql://zoey:hunter2@db/users")
    monkeypatch.setenv("SIDELINE_KAFKA__SASL_PASSWORD", "hunter2")
    code, out, err = command("config", "show", "--origin")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "setting\tvalue\torigin",
        "kafka\tbroker:9092\tsideline.toml",
        "database\tpostgresql://zoey:***@db/users\tenvironment SIDELINE_DATABASE",
        "kafka.sasl.password\t***\tenvironment SIDELINE_KAFKA__SASL_PASSWORD",
    ]
    code, out, _ = command("config", "show", "--json", "--origin")
    assert json.loads(out)["kafka"] == {"value": "broker:9092", "origin": "sideline.toml"}
    code, out, _ = command("config", "show", "--json")
    assert json.loads(out)["kafka.sasl.password"] == "***"


def test_config_show_reports_a_broken_file(command, tmp_path):
    """A settings file with a typo: one sentence, exit code 2 (E1)."""
    (tmp_path / "sideline.toml").write_text('kafak = "broker:9092"\n', "utf-8")
    code, out, err = command("config", "show")
    assert (code, out) == (2, "")
    assert "did you mean 'kafka'?" in err


def walk(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    found = [(path, command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found += walk(inner, f"{path} {name}")
    return found


def test_every_command_and_option_says_what_it_does():
    """Nobody has to read the source to use an option (E1)."""
    silent = []
    for path, command in walk(main.cli, "sideline"):
        if not command.help:
            silent.append(path)
        silent += [
            f"{path} {option.opts[0]}"
            for option in command.params
            if isinstance(option, click.Option) and not option.help
        ]
    assert silent == []


def test_every_command_that_prints_data_can_print_json():
    """`--json` is everywhere where a program might read the answer (E1)."""
    without = {"sideline completion"}
    for path, command in walk(main.cli, "sideline"):
        if isinstance(command, click.Group) or path in without:
            continue
        assert "--json" in {name for each in command.params for name in each.opts}, path


def test_an_interrupt_that_an_extension_disguised_is_still_one(monkeypatch, capsys):
    """Ctrl-C while a C extension waits ends with 130, not with an unexpected SystemError."""

    def interrupted(_arguments):
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    monkeypatch.setattr(main, "_invoke", interrupted)
    assert main.run(["status"]) == 130
    assert "interrupted" in capsys.readouterr().err
