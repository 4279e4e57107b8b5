"""Contestants that need more than the others run only when they are asked for."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import contest, jars, optional
from bench.__main__ import settled
from bench.cpu import Cpu
from bench.settings import Settings
from bench.suites import kafka
from sideline.stack.jars import read_lock
from sideline.stack.java import Java


@pytest.fixture
def said():
    return []


@pytest.fixture(autouse=True)
def fetched(monkeypatch):
    """Notes what would have been fetched."""
    found = []
    monkeypatch.setattr(optional.packages, "fetch_environment", lambda _: found.append("quix"))
    monkeypatch.setattr(optional.jars, "streams", lambda _: found.append("streams"))
    return found


def run(name: str, rate: float) -> contest.Run:
    return contest.Run(name, 10, 1.0, rate, Cpu(1, 1, 1), [])


def test_nothing_is_fetched_for_those_who_were_not_asked(fetched, said):
    """`make bench` installs neither quixstreams nor Kafka Streams."""
    assert optional.ready(Settings().optional, said.append, lambda *_: None) == []
    assert (fetched, said) == ([], [])


def test_asking_for_optional_ones_leaves_nobody_out():
    """They come on top; naming one of the others is a choice among these."""
    assert settled(("streams", "quix")) == Settings(optional=("quix", "streams"))
    assert settled(("quix", "bare")) == Settings(peers=("bare",), optional=("quix",))
    assert settled(()) == Settings()


def test_those_who_were_asked_are_fetched_and_ready(monkeypatch, fetched, said):
    """Their commits are seen from outside: they cannot report what Kafka has not committed."""
    monkeypatch.setattr(optional, "compiler", lambda: Path("java"))
    ready = optional.ready(("quix", "streams"), said.append, lambda *_: None)
    assert [peer.name for peer in ready] == ["quixstreams", "Kafka Streams"]
    assert {peer.commits for peer in ready} == {"offsets"}
    assert (fetched, said) == (["quix", "streams"], [])


def test_kafka_streams_is_left_out_where_no_jdk_is(monkeypatch, fetched, said):
    """A Java that cannot compile is enough for everything else; one sentence says so."""
    monkeypatch.setattr(optional, "compiler", lambda: None)
    assert optional.ready(("streams",), said.append, lambda *_: None) == []
    assert fetched == []
    assert len(said) == 1
    assert "javac" in said[0]


def test_a_java_that_cannot_compile_is_passed_over(monkeypatch, tmp_path):
    """Everybody's Java is taken if it is a JDK, otherwise the one that PATH's javac belongs to."""
    for home, names in (("jre", ["java"]), ("jdk", ["java", "javac"])):
        (tmp_path / home / "bin").mkdir(parents=True)
        for name in names:
            (tmp_path / home / "bin" / name).touch(mode=0o755)
    jre = Java(tmp_path / "jre", 17, "JAVA_HOME")
    monkeypatch.setattr(optional, "find_java", lambda: jre)
    monkeypatch.setenv("PATH", str(tmp_path / "jre" / "bin"))
    assert optional.compiler() is None
    monkeypatch.setenv("PATH", str(tmp_path / "jdk" / "bin"))
    assert optional.compiler() == tmp_path / "jdk" / "bin" / "java"


def test_aims_are_for_those_who_ran():
    """A contestant that was not asked for is not a missed aim; each that ran has one."""
    runs = {"sideline": [run("sideline", 200.0)], "copy loop": [run("copy loop", 100.0)]}
    assert [found.what for found in kafka.findings(runs)] == ["against a loop by hand"]
    runs |= {peer.name: [run(peer.name, 50.0)] for peer in optional.OPTIONAL.values()}
    found = {one.what: (one.value, one.aim) for one in kafka.findings(runs)}
    assert found["ahead of Kafka Streams"] == (4.0, 1.0)
    assert found["against quixstreams"] == (4.0, 4.0)
    assert set(kafka.ALONE) == {peer.name for peer in optional.OPTIONAL.values()}
    assert set(kafka.ALONE.values()) <= set(kafka.AIMS)


@pytest.mark.parametrize(("configuration", "lock"), [("jdbc", "jars"), ("streams", "streams")])
def test_locks_pin_what_ivy_is_asked_for(configuration, lock):
    """A version that changes in one place only is noticed without a network."""
    pins = read_lock(jars.HERE / f"{lock}.lock")
    root = ET.parse(jars.HERE / "ivy.xml").getroot()
    asked = [d for d in root.iter("dependency") if d.get("conf").startswith(f"{configuration}->")]
    assert asked
    assert {f"{each.get('name')}-{each.get('rev')}.jar" for each in asked} <= set(pins)
