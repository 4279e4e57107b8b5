"""Every client over TLS with a password; whoever is not let in reads why, and no secret."""

from __future__ import annotations

import json
import shutil
import sys
import time
import uuid
from collections.abc import Iterator

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from sideline import Kafka, Pipeline, Publish, Publisher
from sideline.cli import main
from sideline.engine.lease import Lease, Share
from sideline.engine.worker import Access, Worker
from sideline.errors import ConfigurationError, KafkaUnreachableError
from sideline.ledger import schema
from sideline.ledger.place import Place
from sideline.settings import Settings
from sideline.topics.admin import Cluster
from tests.support import secure_broker
from tests.support.outputs import read_committed
from tests.support.pipelines import applied, write_app
from tests.support.secure_broker import PASSWORD, SecureBroker
from tests.support.waiting import wait_for

WRONG = "pa55word-that-is-wrong"


@pytest.fixture(scope="module")
def secure(run) -> Iterator[SecureBroker]:
    directory = run.directory("secure")
    broker = secure_broker.start(directory)
    yield broker
    broker.stop()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def admin(secure):
    return secure.admin()


@pytest.fixture
def topic(admin) -> str:
    return make(admin, f"users-{uuid.uuid4().hex[:8]}", 2)


def make(admin: AdminClient, name: str, partitions: int) -> str:
    """Make a topic: the controller answers before the broker knows it."""
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result()
    wait_for(lambda: name in admin.list_topics(timeout=30).topics, what=f"topic {name}")
    return name


@pytest.fixture
def sideline(secure, database, monkeypatch, capsys, tmp_path):
    """Run a command with the secure broker's environment; exit code and all that was said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIDELINE_DATABASE", database)
    monkeypatch.delitem(sys.modules, "app", raising=False)

    def sideline(*arguments: str, door: str = "GOOD", **changed: str) -> tuple[int, str]:
        for name, value in secure.environment(door, **changed).items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        code = main.run(arguments)
        said = capsys.readouterr()
        return code, said.out + said.err

    return sideline


def test_a_whole_pipeline_runs_over_tls_with_a_password(
    secure, admin, topic, command, sideline, database, ready, tmp_path
):
    """Admin, publisher, driver, workers, relay, status, scans: all by SASL_SSL alone (E2)."""
    options = "on_failure=DeadLetter(attempts=1), independent=True"
    before = "from sideline import DeadLetter"
    fails = 'if event.value == b"bad": raise ValueError("bad")'
    app = write_app(tmp_path, "safe", topic, before=fails, options=options)
    file = tmp_path / "app.py"
    file.write_text(f"{before}\n{file.read_text()}")
    assert sideline("topics", "create", app)[0] == 0
    lines = "".join(json.dumps({"id": n % 5, "n": n}) + "\n" for n in range(40))
    (tmp_path / "lines").write_text(lines)
    assert sideline("publish", topic, "lines", "--key-field", "id")[0] == 0
    found = Settings(secure.address(), None, secure.properties())
    with Publisher(settings=found) as publisher:
        publisher.publish(topic, "bad", key="x")

    ran = command("run", app, "--once", **secure.environment(), APP_DB=database)

    assert ran.end(120) == 0, ran.err
    assert len(applied(database)) == 40
    code, shown = sideline("status", "safe", "--json")
    assert code == 0, shown
    assert json.loads(shown)["lag"] == 0, shown
    letters = f"{topic}.safe.dlq"
    code, shown = sideline("parked", "import", letters, "--pipeline", "safe", "--dry-run", "--json")
    assert code == 0, shown
    assert json.loads(shown)["read"] == 1
    assert PASSWORD not in ran.out + ran.err + shown


def test_records_leave_in_transactions_over_tls(secure, admin, topic, database):
    """Groups, producers and readers of sink Kafka(): by SASL_SSL alone (P2, P4)."""
    out = make(admin, f"{topic}.out", 1)
    found = Settings(secure.address(), None, secure.properties())
    with Publisher(settings=found) as publisher:
        for number in range(20):
            publisher.publish(topic, f"{number}", key="k", partition=0)
    pipeline = Pipeline("safe", topics=topic, sink=Kafka(), slice_size=5)
    pipeline.handler(lambda event: Publish(out, event.value, event.key))
    with psycopg.connect(database) as connection:
        schema.migrate(connection)
    place = Place(database, pipeline)
    place.hold()
    place.add(topic, 0, "an id", 0)
    epoch = place.epoch
    place.close()
    worker = Worker(pipeline, Access(database, found.kafka_client()))

    report = worker.work(Lease("safe", epoch, 1, (Share(topic, 0, 20),), time.time() + 60))

    worker.close()
    assert report.failure is None

    def seen() -> list[int]:
        there = read_committed(secure.address(), out, 0, **secure.properties())
        return [int(one.value()) for one in there]

    # A broker says that a transaction is over before its readers may see it.
    wait_for(lambda: seen() == list(range(20)), what="records to be seen")


@pytest.mark.parametrize(
    ("door", "changed", "words"),
    [
        ("GOOD", {"sasl_password": WRONG}, "refuses the credentials"),
        ("GOOD", {"sasl_username": "nobody"}, "refuses the credentials"),
        ("GOOD", {"sasl_mechanism": "PLAIN"}, "SCRAM-SHA-512"),
        ("GOOD", {"ssl_ca_location": "stranger"}, "not trusted"),
        ("EXPIRED", {}, "expired"),
        ("ELSEWHERE", {}, "mismatch"),
        ("MUTUAL", {"security_protocol": "ssl"}, "certificate"),
    ],
    ids=["password", "user", "mechanism", "authority", "expired", "elsewhere", "no-certificate"],
)
def test_whoever_is_not_let_in_is_told_why(secure, sideline, door, changed, words):
    """One sentence, exit 6, and no secret in it, not with --debug either (P4)."""
    if changed.get("ssl_ca_location"):
        changed = {"ssl_ca_location": str(secure.stranger.certificate)}

    code, said = sideline("publish", "users", "--debug", door=door, **changed)

    assert code == 6, said
    assert words in said
    assert secure.address(door) in said
    assert PASSWORD not in said
    assert WRONG not in said


def test_files_that_cannot_be_used_are_named(secure, sideline, tmp_path):
    """A missing or broken file, or a key's wrong password, is a wrong setting (exit 2)."""
    locked = secure.authority.encrypted(secure.client, PASSWORD)
    broken = tmp_path / "broken.pem"
    broken.write_text("nonsense")
    client = {
        "security_protocol": "ssl",
        "ssl_certificate_location": str(secure.client.certificate),
        "ssl_key_location": str(locked),
    }
    for changed, words in (
        ({"ssl_ca_location": "/nowhere/ca.pem"}, "no such file"),
        ({"ssl_ca_location": str(broken)}, "ssl.ca.location cannot be used"),
        (client | {"ssl_key_password": WRONG}, "ssl.key.password"),
    ):
        code, said = sideline("publish", "users", "--debug", door="MUTUAL", **changed)
        assert code == 2, said
        assert words in said
        assert WRONG not in said


def test_certificates_of_clients_and_inline_pem(secure, topic):
    """Files, a key under a password, or PEM text itself (P4)."""
    locked = secure.authority.encrypted(secure.client, PASSWORD)
    files = {
        "ssl.ca.location": str(secure.authority.certificate),
        "ssl.certificate.location": str(secure.client.certificate),
        "ssl.key.location": str(locked),
        "ssl.key.password": PASSWORD,
    }
    inline = {
        "ssl.ca.pem": secure.authority.certificate.read_text(),
        "ssl.certificate.pem": secure.client.certificate.read_text(),
        "ssl.key.pem": secure.client.key.read_text(),
    }
    for given in (files, inline):
        found = Settings(secure.address("MUTUAL"), None, {"security.protocol": "ssl", **given})
        assert Cluster(found.kafka_client()).topic(topic).name == topic
        with Publisher(settings=found) as publisher:
            assert publisher.publish(topic, b"x", key="k").result(30).offset >= 0
        assert PASSWORD not in repr(found)
        assert "PRIVATE KEY" not in repr(found)


def test_a_publisher_is_told_too(secure):
    """The same errors for programs (P1, P4)."""
    wrong = Settings(secure.address(), None, secure.properties(sasl_password=WRONG))
    with Publisher(settings=wrong) as publisher, pytest.raises(KafkaUnreachableError) as caught:
        publisher.publish("users", b"x", key="k")
    assert "credentials" in caught.value.message
    missing = Settings(secure.address(), None, secure.properties(ssl_ca_location="/nowhere"))
    with pytest.raises(ConfigurationError, match="no such file"):
        Publisher(settings=missing)
