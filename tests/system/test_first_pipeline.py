"""docs/first-pipeline.md, step by step, as a reader would do it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "first-pipeline.md"
STEP = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def reader(run, kafka, database) -> Iterator[Path]:
    """A reader's directory; broker and database are those of the test run."""
    directory = run.directory("reader")
    shutil.copytree(ROOT / "examples", directory / "examples")
    yield directory
    shutil.rmtree(directory)
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.delete_topics(["users"], operation_timeout=30)["users"].result()


def test_first_pipeline_can_be_followed(reader, kafka, database):
    """A newcomer who copies every step ends with Zoiee in the table (E1, E2)."""
    environ = os.environ | {"SIDELINE_KAFKA": kafka, "SIDELINE_DATABASE": database}
    steps = STEP.findall(PAGE.read_text("utf-8"))
    assert [kind for kind, _ in steps].count("python") == 4
    for kind, text in steps:
        if kind == "python":
            follow([sys.executable, "-c", text], reader, environ)
            continue
        for line in text.splitlines():
            words = line.removeprefix("$ ").split()
            # The test run's own stack stands in for the reader's.
            if words[:2] != ["sideline", "stack"]:
                follow([sys.executable, "-m", *words], reader, environ)


def follow(command: list[str], directory: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_handler_of_the_page_is_the_example():
    """The page shows examples/users.py as it is."""
    example = (ROOT / "examples" / "users.py").read_text("utf-8").partition('"""\n\n')[2]
    shown = [text for kind, text in STEP.findall(PAGE.read_text("utf-8")) if kind == "python"]
    assert example in shown
