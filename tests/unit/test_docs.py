"""Docs that are true: their Python runs, their commands exist, their lists are complete."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import click
import pytest

import sideline
from sideline import Pipeline, errors, kafka_properties, settings
from sideline.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
SHELLS = {"console", "sh", "bash", "shell"}


class Block(NamedTuple):
    page: Path
    line: int
    info: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for fence in FENCE.finditer(text):
            line = text.count("\n", 0, fence.start()) + 1
            found.append(Block(page, line, fence[2].strip(), fence[3]))
    return found


BLOCKS = blocks()
PYTHON = [block for block in BLOCKS if block.info.split()[:1] == ["python"]]


def by_place(block: Block) -> str:
    return block.place


@pytest.mark.parametrize("block", PYTHON, ids=by_place)
def test_python_in_the_docs_compiles(block):
    """No example has a syntax error; one that is marked ``python run`` runs."""
    compile(block.text, block.place, "exec")
    if block.info.split()[1:] == ["run"]:
        done = subprocess.run(
            [sys.executable, "-c", block.text],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_some_python_in_the_docs_is_run():
    """The mark is in use: a renamed mark would let everything pass."""
    assert any(block.info == "python run" for block in PYTHON)


def commands(text: str) -> list[str]:
    """The calls of sideline in lines of a shell."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        parts = re.split(r"\s(?:&&|\|\||[;|&])\s|;\s", line.strip().removeprefix("$ "))
        found += [part for part in parts if part.split()[:1] == ["sideline"]]
    return found


def written_commands() -> list[tuple[str, str]]:
    found = []
    for block in BLOCKS:
        if block.info.split()[:1] and block.info.split()[0] in SHELLS:
            found += [(block.place, command) for command in commands(block.text)]
    for page in PAGES:
        prose = FENCE.sub("", page.read_text("utf-8"))
        for code in INLINE.findall(prose):
            found += [(page.name, command) for command in commands(code)]
    return found


def problem(command: str) -> str | None:
    """Why the real command would not understand the call; None: it would."""
    words = shlex.split(command, comments=True)[1:]
    current: click.Command = main.cli
    context = click.Context(current)
    options = {"--debug", "--help", "-h"}
    for word in words:
        if word in {"...", "…"}:
            return None
        if word.startswith("-"):
            known = {name for each in current.params for name in (*each.opts, *each.secondary_opts)}
            if word.partition("=")[0] not in known | options:
                return f"{word} is no option of {current.name}"
        elif isinstance(current, click.Group):
            found = current.get_command(context, word)
            if found is None:
                return f"{word} is no command of {current.name}"
            current = found
    return None


def test_commands_in_the_docs_exist():
    """What a reader types is understood: command and options."""
    written = written_commands()
    assert any("run" in command for _, command in written)
    wrong = [f"{place}: {command}: {problem(command)}" for place, command in written]
    assert [line for line in wrong if not line.endswith(": None")] == []


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("sideline config show --origin", None),
        ("sideline --debug config show  # why", None),
        ("sideline config shw", "shw is no command of config"),
        ("sideline config show --orign", "--orign is no option of show"),
        ("sideline ... --whatever", None),
    ],
)
def test_wrong_commands_are_noticed(command, wrong):
    """The check above can fail."""
    assert problem(command) == wrong


def test_commands_are_found_in_lines_of_a_shell():
    """Prompts, chains, pipes and continued lines are understood."""
    text = "$ sideline a; sideline b && sideline c | head\nmake x\n  sideline d \\\n  --e\n"
    assert [shlex.split(found)[1:] for found in commands(text)] == [
        ["a"],
        ["b"],
        ["c"],
        ["d", "--e"],
    ]


def test_make_targets_in_the_docs_exist():
    """A reader who types make gets what the page says."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    shells = "\n".join(block.text for block in BLOCKS if block.info in SHELLS)
    named = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", shells, re.MULTILINE))
    for page in PAGES:
        named |= set(re.findall(r"`make ([a-z-]+)", page.read_text("utf-8")))
    assert named
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    """A moved page leaves no dead link behind."""
    links = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_index_lists_every_page():
    """A page that nobody can find is not written."""
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert [page for page in sorted(pages) if f"({page})" not in index] == []


def test_exit_codes_are_all_documented():
    """The table and the tree of errors say the same."""
    table: dict[int, set[str]] = {}
    for code, row in re.findall(
        r"^\| (\d+) \|(.*)\|$", (ROOT / "docs/exit-codes.md").read_text("utf-8"), re.MULTILINE
    ):
        table[int(code)] = set(INLINE.findall(row.rpartition("|")[2]))
    real: dict[int, set[str]] = {
        0: set(),
        main.EXIT_INTERRUPTED: set(),
        main.EXIT_READER_GONE: set(),
    }
    waiting = [errors.SidelineError]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        real.setdefault(cls.exit_code, set()).add(cls.code)
    assert table == real


def test_every_setting_is_documented():
    """Each property and variable that can be set stands in docs/configuration.md."""
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    named = set(INLINE.findall(text))
    assert sorted(set(kafka_properties.ALLOWED) - named) == []
    table = text.partition("## Kafka client properties")[2].partition("Everything else")[0]
    listed = {name for name in INLINE.findall(table) if re.fullmatch(r"[a-z]+(\.[a-z]+)+", name)}
    assert sorted(listed - set(kafka_properties.ALLOWED)) == []
    variables = set(settings.READ_ELSEWHERE) - {"SIDELINE_CRASH_AT"}
    variables |= {f"SIDELINE_ALERT_{name.upper()}" for name in settings.ALERTS}
    variables |= {f"SIDELINE_RETENTION_{name.upper()}" for name in settings.RETENTION}
    assert sorted({"SIDELINE_KAFKA", "SIDELINE_DATABASE", *variables} - named) == []


def test_every_parameter_of_a_pipeline_is_documented():
    """The table of docs/pipeline.md has each of them, in their order, with its real default."""
    text = (ROOT / "docs" / "pipeline.md").read_text("utf-8")
    table = re.findall(r"^\| `(\w+)` \|(?: `([^|]+)`)? \| (.+) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in table] == list(inspect.signature(Pipeline).parameters)
    bare = Pipeline("name", "topic")
    for name, default, _ in table[2:]:
        given = eval(default, vars(sideline))
        same = Pipeline("name", "topic", **{name: given})
        attribute = {"start": "start_at"}.get(name, name)
        assert getattr(same, attribute) == getattr(bare, attribute), name
    # Those that have none are the ones that are needed.
    assert [default for _, default, _ in table[:2]] == ["", ""]


def test_settings_file_in_the_docs_is_valid(tmp_path):
    """The example of sideline.toml can be copied."""
    examples = [block for block in BLOCKS if block.info == "toml"]
    whole = []
    for block in examples:
        (tmp_path / "sideline.toml").write_text(block.text, "utf-8")
        found = settings.load(directory=tmp_path, environ={})
        assert "sideline.toml" in found.origins.values(), block.place
        whole.append(bool(found.kafka and found.database))
    assert any(whole)


def test_every_dependency_has_its_reason():
    """What is declared is explained in docs/dependencies.md."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    declared = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["stack"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    text = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    names = [re.split(r"[\[<>=~! ]", line)[0] for line in declared]
    assert [name for name in names if f"**{name}**" not in text] == []
