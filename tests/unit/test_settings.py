"""Settings: where they come from, what is refused, and that no password shows."""

from __future__ import annotations

import re
import types
from datetime import timedelta
from pathlib import Path

import pytest

from sideline import kafka_properties, settings
from sideline.errors import ConfigurationError
from sideline.retention import Retention


@pytest.fixture
def load(tmp_path):
    """Load settings from an empty directory with nothing in the environment."""

    def load(text: str | None = None, *, environ=None, **flags):
        if text is not None:
            (tmp_path / "sideline.toml").write_text(text, encoding="utf-8")
        return settings.load(directory=tmp_path, environ=environ or {}, **flags)

    return load


@pytest.fixture
def refusal(load):
    """What the user reads when the settings are refused."""

    def refusal(text: str | None = None, **given) -> str:
        with pytest.raises(ConfigurationError) as caught:
            load(text, **given)
        return str(caught.value)

    return refusal


def test_nothing_configured_is_no_error_until_it_is_needed(load):
    """A command that needs no broker works without one; the error names the next step (E1)."""
    found = load()
    assert (found.kafka, found.database) == (None, None)
    assert found.origins == {"kafka": "default", "database": "default"}
    with pytest.raises(ConfigurationError, match="nothing says where Kafka is") as caught:
        found.require_kafka()
    assert "sideline stack up" in (caught.value.hint or "")
    with pytest.raises(ConfigurationError, match="nothing says where the database is"):
        found.require_database()
    with pytest.raises(ConfigurationError):
        found.kafka_client()


def test_flag_beats_environment_beats_file(load):
    """The nearest source wins, setting by setting, and says who it was (E1)."""
    file = """
        database = "postgresql://file/db"
        [kafka]
        bootstrap = ["file-1:9092", "file-2:9092"]
        client.id = "from-file"
        "socket.timeout.ms" = 5000
    """
    found = load(file)
    assert found.kafka == "file-1:9092,file-2:9092"
    assert found.origins["kafka"] == "sideline.toml"
    assert found.kafka_properties == {"client.id": "from-file", "socket.timeout.ms": "5000"}

    environ = {"SIDELINE_KAFKA": "env:9092", "SIDELINE_KAFKA__CLIENT_ID": "from-env"}
    found = load(file, environ=environ)
    assert found.kafka == "env:9092"
    assert found.database == "postgresql://file/db"
    assert found.origins["kafka"] == "environment SIDELINE_KAFKA"
    assert found.origins["kafka.client.id"] == "environment SIDELINE_KAFKA__CLIENT_ID"
    assert found.origins["kafka.socket.timeout.ms"] == "sideline.toml"

    found = load(file, environ=environ, kafka="flag:9092", database="postgresql:///flag")
    assert (found.kafka, found.database) == ("flag:9092", "postgresql:///flag")
    assert found.origins["kafka"] == found.origins["database"] == "flag"


def test_client_gets_servers_properties_and_what_the_caller_adds(load):
    """One door builds every client's configuration."""
    found = load(environ={"SIDELINE_KAFKA__SASL_MECHANISM": "PLAIN"}, kafka="a:1, b:2")
    assert found.kafka_client(**{"group.id": "login"}) == {
        "bootstrap.servers": "a:1,b:2",
        "sasl.mechanism": "PLAIN",
        "group.id": "login",
    }


@pytest.mark.parametrize(
    "database",
    [
        "postgresql://zoey:hunter2@db/users",
        "postgres://zoey:hunter2@db1:5432,db2:5433/users?sslmode=require",
        "postgresql://zoey@db/users?password=hunter2",
        "postgresql://zoey@db/users?application_name=x&pass%77ord=hunter2",
        "postgresql://db/users?sslpassword=hunter2&user=zoey",
        "host=db user=zoey password=hunter2 dbname=users",
        "host=db password = 'hun\\'ter2 hunter2' user=zoey",
        "password=hunter2",
        "host=db sslpassword=hunter2",
        "postgresql://zoey:hunter2%40@[::1]:5432/users",
    ],
)
def test_password_of_the_database_never_shows(load, database):
    """Whatever form libpq takes, repr and `config show` hide the password (E1)."""
    found = load(environ={"SIDELINE_DATABASE": database})
    assert found.require_database() == database
    for text in (repr(found), str(found), str(found.shown())):
        assert "hunter2" not in text
        assert "ter2" not in text
        assert "***" in text
    assert found.shown()["database"] != database


def test_raw_at_sign_in_a_password_hides_more_rather_than_less(load):
    """A password that should have been encoded is refused without being shown, even in part."""
    for url in ("postgresql://zoey:hun@ter2@db/users", "postgresql://zoey:hun/ter2@db/users"):
        try:
            text = repr(load(database=url))
        except ConfigurationError as error:
            text = f"{error} {error.hint}"
        assert "ter2" not in text
        assert "hun" not in text


@pytest.mark.parametrize("name", sorted(kafka_properties.SECRET))
def test_secret_properties_never_show(load, name):
    """SASL and key passwords are masked in repr and in what is shown."""
    variable = "SIDELINE_KAFKA__" + name.upper().replace(".", "_")
    found = load(environ={variable: "hunter2"})
    assert found.kafka_properties[name] == "hunter2"
    assert "hunter2" not in repr(found) + str(found.shown())
    assert found.shown()[f"kafka.{name}"] == "***"


@pytest.mark.parametrize("name", sorted(kafka_properties.REFUSED))
def test_properties_that_would_break_a_promise_are_refused_with_the_reason(refusal, name):
    """Nobody turns on auto-commit or uncommitted reads by an environment variable (C2, C3)."""
    message = refusal(environ={"SIDELINE_KAFKA__" + name.upper().replace(".", "_"): "x"})
    assert kafka_properties.REFUSED[name] in message
    assert name not in kafka_properties.ALLOWED


def test_mistyped_property_is_guessed(refusal):
    """A typo in a property's name is an error that says what was probably meant."""
    message = refusal(environ={"SIDELINE_KAFKA__SASL_PASWORD": "hunter2"})
    assert "did you mean 'sasl.password'?" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SECURITY_PROTOCOL", "SASL", "plaintext, ssl, sasl_plaintext or sasl_ssl"),
        ("SOCKET_TIMEOUT_MS", "10s", "a whole number"),
        ("SOCKET_KEEPALIVE_ENABLE", "yes", "true or false"),
        ("SASL_USERNAME", "", "not empty"),
        ("SASL_PASSWORD", "", "not empty"),
    ],
)
def test_impossible_property_values_are_refused(refusal, variable, value, expected):
    """A value that librdkafka would refuse later, in its own words, is refused now."""
    assert expected in refusal(environ={f"SIDELINE_KAFKA__{variable}": value})


def test_choices_are_taken_in_any_case(load):
    """Java's SASL_SSL and librdkafka's sasl_ssl are one thing."""
    found = load(environ={"SIDELINE_KAFKA__SECURITY_PROTOCOL": "SASL_SSL"})
    assert found.kafka_properties == {"security.protocol": "SASL_SSL"}


def test_every_error_of_a_file_is_said_at_once(refusal):
    """Nobody corrects a settings file one run at a time (E1)."""
    message = refusal("""
        databse = "postgresql://zoey:hunter2@db/users"
        [kafka]
        bootstrap = "http://broker"
        "enable.auto.commit" = true
        sasl.pasword = "hunter2"
        client.id = ["a"]
        [database]
        uri = "x"
    """)
    assert message.startswith("the settings have 6 errors:")
    assert "'databse' is not a setting; did you mean 'database'?" in message
    assert "'http://broker', which is not host:port" in message
    assert "'enable.auto.commit' in [kafka] cannot be set: sideline keeps the progress" in message
    assert "did you mean 'sasl.password'?" in message
    assert "'client.id' in [kafka] must be text, a whole number, true or false." in message
    assert "'uri' in [database] is not a setting" in message
    assert "hunter2" not in message


def test_broken_toml_says_the_line(refusal):
    """A syntax error is found where it is."""
    message = refusal('[kafka]\nbootstrap = "a:1\nsasl.password = "hunter2"\n')
    assert "sideline.toml is not valid TOML" in message
    assert "line 2" in message
    assert "hunter2" not in message


def test_file_that_is_not_text_is_said_so(refusal, tmp_path):
    """Bytes that are no UTF-8 are one sentence, not a traceback."""
    (tmp_path / "sideline.toml").write_bytes(b"\xff\xfe")
    assert "it is not UTF-8" in refusal()


def test_unreadable_file_is_said_so(refusal, tmp_path):
    """A directory in the file's place is one sentence, not a traceback."""
    (tmp_path / "sideline.toml").mkdir()
    assert "sideline.toml cannot be read" in refusal()


def test_database_below_the_kafka_table_is_explained(refusal):
    """TOML's most common trap gets its own sentence."""
    message = refusal('[kafka]\nbootstrap = "a:1"\ndatabase = "postgresql:///x"\n')
    assert "'database' in [kafka] belongs above [kafka], or into [database]." in message


def test_tables_and_strings_say_the_same(load):
    """The short form and the table are two spellings of one setting."""
    short = load('kafka = "a:1"\ndatabase = "postgresql:///x"\n')
    long = load('[kafka]\nbootstrap = "a:1"\n[database]\nurl = "postgresql:///x"\n')
    assert (
        (short.kafka, short.database) == (long.kafka, long.database) == ("a:1", "postgresql:///x")
    )


def test_unknown_environment_name_is_refused(refusal):
    """A mistyped production setting must not find an empty broker (E2)."""
    message = refusal(environ={"SIDELINE_DATABSE": "postgresql://zoey:hunter2@db/users"})
    assert message == "SIDELINE_DATABSE is not a setting; did you mean 'SIDELINE_DATABASE'?"


@pytest.mark.parametrize(
    "value",
    ["", " ", "a:0", "a:65536", "a:b", "kafka://a:9092", "a:1,,b:2", "a:1;b:2", "a b", "u:p@h:1"],
)
def test_malformed_servers_are_refused_in_one_sentence(refusal, value):
    """What cannot be a list of brokers is refused before anybody waits for it."""
    message = refusal(environ={"SIDELINE_KAFKA": value})
    assert message.startswith("SIDELINE_KAFKA ")
    assert "\n" not in message
    assert "u:p" not in message


@pytest.mark.parametrize("value", ["localhost", "a.b-c.d:9092", "10.0.0.1:9092", "[::1]:9092,b"])
def test_possible_servers_are_taken(load, value):
    """Names, addresses and default ports are all fine."""
    assert load(kafka=value).kafka == value


@pytest.mark.parametrize(
    "value",
    [
        "",
        "  ",
        "users",
        "jdbc:postgresql://db/users",
        "mysql://zoey:hunter2@db/users",
        "postgresql://db:port/users",
        "postgresql://db:70000/users",
        "postgresql://[::1/users",
        "host=db hunter2",
        "host='db",
    ],
)
def test_malformed_databases_are_refused_without_being_quoted(refusal, value):
    """What libpq could not take is refused in one sentence that shows no password."""
    message = refusal(environ={"SIDELINE_DATABASE": value})
    assert message.startswith("SIDELINE_DATABASE ")
    assert "\n" not in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "value",
    [
        "postgresql:///users",
        "postgresql://db",
        "postgresql:///users?host=/run/postgresql",
        "postgresql://%2Frun%2Fpostgresql/users",
        "postgresql://zoey:p%40ss@a:1,b:2/users?target_session_attrs=primary",
        "dbname=users",
        "host = db  dbname='my users' options='-c a=b'",
    ],
)
def test_every_form_of_libpq_is_taken(load, value):
    """URLs, sockets, several hosts and pairs are libpq's business."""
    assert load(database=value).database == value


@pytest.fixture
def stack_up(monkeypatch, tmp_path):
    """A stack that says it is up in the directory."""
    from sideline import stack

    (tmp_path / ".sideline").mkdir()
    asked = []

    def current(directory=None):
        asked.append(directory)
        return types.SimpleNamespace(bootstrap="127.0.0.1:1", database="postgresql://127.0.0.1/x")

    monkeypatch.setattr(stack, "current", current, raising=False)
    return asked


def test_stack_fills_what_is_not_configured(load, stack_up, tmp_path):
    """A stack that is up in ./.sideline is used when nothing is configured (E2)."""
    found = load()
    assert (found.kafka, found.database) == ("127.0.0.1:1", "postgresql://127.0.0.1/x")
    assert found.origins == dict.fromkeys(("kafka", "database"), "stack in ./.sideline")
    assert stack_up == [tmp_path / ".sideline"]

    found = load(kafka="real:9092")
    assert (found.kafka, found.database) == ("real:9092", "postgresql://127.0.0.1/x")


def test_stack_is_not_asked_when_everything_is_configured(load, stack_up):
    """A production run does not look at leftovers in its directory."""
    load(kafka="real:9092", database="postgresql://real/x")
    assert stack_up == []


def test_properties_without_a_broker_do_not_find_the_stack(load, stack_up):
    """Half a production configuration must not find an empty broker (E2)."""
    found = load(environ={"SIDELINE_KAFKA__SASL_USERNAME": "zoey"})
    assert found.kafka is None
    assert found.database == "postgresql://127.0.0.1/x"


def test_every_name_that_the_code_reads_is_known(load):
    """A SIDELINE_ name that some module reads is not refused as a typo."""
    source = Path(settings.__file__).parent
    names = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r"[\"'](SIDELINE_[A-Z][A-Z_]*[A-Z])[\"']", path.read_text("utf-8"))
    }
    assert "SIDELINE_KAFKA" in names
    fine = {"SIDELINE_KAFKA": "a:1", "SIDELINE_DATABASE": "postgresql:///x"}
    load(environ={name: fine.get(name, "x") for name in names})


def test_alerts_are_told_whom_the_settings_name(load):
    """A command is split into words, never given to a shell; a lag is a time or a count (S2)."""
    environ = {
        "SIDELINE_ALERT_COMMAND": "page --team 'login people'",
        "SIDELINE_ALERT_WEBHOOK": "https://hooks.example/T000/hunter2",
        "SIDELINE_ALERT_LAG": "5m",
    }
    found = load(environ=environ)
    assert found.alerting.command == ("page", "--team", "login people")
    assert found.alerting.webhook == "https://hooks.example/T000/hunter2"
    assert (found.alerting.lag_seconds, found.alerting.lag_events) == (300, None)
    assert found.origins["alerts.lag"] == "environment SIDELINE_ALERT_LAG"

    file = """
        [alerts]
        command = ["page", "the team"]
        lag = 20000
    """
    found = load(file)
    assert found.alerting.command == ("page", "the team")
    assert (found.alerting.lag_seconds, found.alerting.lag_events) == (None, 20_000)
    assert found.origins["alerts.command"] == "sideline.toml"
    found = load(file, environ=environ)
    assert (found.alerting.lag_seconds, found.alerting.lag_events) == (300, None)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("WEBHOOK", "https://hooks.example/T000/hunter2"), "https://hooks.example/***"),
        (("WEBHOOK", "https://me:hunter2@hooks.example"), "https://hooks.example/***"),
        (("WEBHOOK", "http://hooks.example:8080/?t=hunter2"), "http://hooks.example:8080/***"),
        (("WEBHOOK", "http://hooks.example:8080/"), "http://hooks.example:8080"),
        (("COMMAND", "page --token hunter2"), "page ***"),
        (("COMMAND", "page"), "page"),
        (("LAG", "90s"), "90s"),
        (("LAG", "500"), "500 events"),
    ],
)
def test_secrets_of_those_who_are_told_never_show(load, given, shown):
    """The path of a webhook is its password; an argument may be a token (S2, E1)."""
    name, value = given
    found = load(environ={f"SIDELINE_ALERT_{name}": value})
    assert found.shown()[f"alerts.{name.lower()}"] == shown
    for text in (repr(found), repr(found.alerting), str(found.shown())):
        assert "hunter2" not in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("COMMAND", "page 'hunter2"), "has a quote that is not closed"),
        (("COMMAND", " "), "names no program"),
        (("WEBHOOK", "file:///etc/hunter2"), "is not an http:// or https:// URL"),
        (("WEBHOOK", "ftp://me:hunter2@host/"), "is not an http:// or https:// URL"),
        (("WEBHOOK", "http://host:hunter2/"), "is not an http:// or https:// URL"),
        (("WEBHOOK", "https:///hunter2"), "is not an http:// or https:// URL"),
        (("WEBHOOK", "https://host/hunter2 x"), "is not an http:// or https:// URL"),
        (("WEBHOOK", ""), "is not an http:// or https:// URL"),
        (("LAG", "-1"), "is neither a span of time like 5m nor a number of events"),
        (("LAG", "soon"), "is neither a span of time like 5m nor a number of events"),
        (("LAGG", "5m"), "did you mean 'SIDELINE_ALERT_LAG'?"),
    ],
)
def test_what_nobody_could_be_told_by_is_refused(refusal, given, words):
    """Before a run begins, and without a secret in the words."""
    text = refusal(environ={f"SIDELINE_ALERT_{given[0]}": given[1]})
    assert words in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("alerts = 'page'", "alerts is a table: [alerts]"),
        ("[alerts]\ncomand = 'page'", "did you mean 'command'?"),
        ("[alerts]\nwebhook = 3", "is not an http:// or https:// URL"),
        ("[alerts]\ncommand = [1]", "must be text, or a list of it"),
        ("[alert]\nlag = 3", "did you mean 'alerts'?"),
    ],
)
def test_alerts_in_the_file_are_checked_like_the_rest(refusal, file, words):
    """Unknown keys are errors."""
    assert words in refusal(file)


def test_what_is_over_is_kept_as_long_as_somebody_says(load):
    """By kind, from the file and the environment; what nobody says stays as it is."""
    found = load(
        "[retention]\nevents = '7d'\naudit = '730d'",
        environ={"SIDELINE_RETENTION_EVENTS": "never", "SIDELINE_RETENTION_ALERTS": "12h"},
    )
    assert found.retention == Retention(
        None, timedelta(days=90), timedelta(hours=12), timedelta(days=730)
    )
    assert found.shown() == {
        "kafka": None,
        "database": None,
        "retention.events": "never",
        "retention.alerts": "43200s",
        "retention.audit": "730d",
    }
    assert found.origins["retention.audit"] == "sideline.toml"
    assert load("").retention == Retention()


@pytest.mark.parametrize(
    ("file", "environ", "words"),
    [
        ("retention = '7d'", {}, "retention is a table: [retention]"),
        ("[retention]\nevent = '7d'", {}, "did you mean 'events'?"),
        ("[retention]\nevents = 7", {}, "is neither an age like 30d nor never"),
        ("", {"SIDELINE_RETENTION_EVENTS": "30"}, "is neither an age like 30d nor never"),
        ("", {"SIDELINE_RETENTION_EVENT": "30d"}, "did you mean 'SIDELINE_RETENTION_EVENTS'?"),
    ],
)
def test_ages_are_checked_like_the_rest(refusal, file, environ, words):
    """A number without its unit is refused: as seconds it would take away everything."""
    assert words in refusal(file, environ=environ)


def test_plaintext_beyond_loopback_is_warned_about_once(caplog, monkeypatch):
    """Records can be read on their way: said once, not for every client (P4)."""
    monkeypatch.setattr(settings, "_warned", set())
    far = settings.Settings("broker-1.example:9092")
    far.kafka_client()
    far.kafka_client()
    (record,) = caplog.records
    assert record.message.startswith(
        "Kafka at broker-1.example:9092 is reached without TLS: records"
    )
    caplog.clear()
    settings.Settings(
        "broker-2.example:9092", None, {"security.protocol": "SASL_PLAINTEXT"}
    ).kafka_client()
    assert "records and passwords" in caplog.text
    caplog.clear()
    for servers in ("localhost:9092", "127.0.0.1:1,[::1]:2", "localhost"):
        settings.Settings(servers).kafka_client()
    settings.Settings(
        "broker-3.example:9092", None, {"security.protocol": "SASL_SSL"}
    ).kafka_client()
    assert not caplog.records
