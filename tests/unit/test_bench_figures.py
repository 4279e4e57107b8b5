"""The bench's arithmetic and its reports say what they claim."""

from __future__ import annotations

import json
import uuid
from xml.etree import ElementTree as ET

import pytest

from bench import events, figures, picture, publish, report, sender
from bench.peers.batches import BATCH_EVENTS, batch_events
from bench.settings import SUITES
from bench.suites import Finding, Outcome
from bench.suites.snapshot import last_against_first


def test_every_suite_can_be_shown():
    """Nobody learns after an hour of measuring that there is no table for it."""
    assert set(report.COLUMNS) == set(SUITES)


def test_percentile_is_a_value_that_was_measured():
    """The nearest rank, never an average of two values."""
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert figures.percentile(values, 0.5) == 3.0
    assert figures.percentile(values, 0.99) == 5.0
    assert figures.percentile([7.0], 0.5) == 7.0


def test_ratio_compares_each_round_with_itself():
    """A round in which the whole machine was slow does not change the ratio."""
    assert figures.ratio_by_round([100, 10, 200], [50, 5, 100]) == 2.0


def test_rate_does_not_count_what_the_first_commit_brought():
    """Start-up time is left out, and so are the events that it bought."""
    assert figures.steady_rate([(10.0, 500), (11.0, 600), (12.0, 700)]) == 100.0


def test_growth_is_per_minute():
    """One megabyte a second is sixty a minute; a flat line is none."""
    assert figures.growth([(0, 100), (1, 101), (2, 102)]) == pytest.approx(60)
    assert figures.growth([(0, 100), (60, 100)]) == 0
    assert figures.growth([(0, 100)]) == 0


def test_everyone_takes_every_place_in_turn():
    """No contestant always runs first, on the coldest or warmest machine."""
    orders = figures.interleave(["a", "b", "c"], 3)
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_last_quarter_against_first_shows_slowing_down():
    """A run that gets slower with every slice is seen."""
    even = [(float(i), i * 10) for i in range(101)]
    slowing = [(float(i * i), i * 10) for i in range(101)]
    assert last_against_first(even) == pytest.approx(1.0)
    assert last_against_first(slowing) < 0.2


def test_a_key_stays_in_one_partition():
    """Otherwise the order of a key would not be the log's (C1)."""
    topic = events.Topic("t", 5_000, 4, 100, hot_per_mille=10)
    homes: dict[bytes, set[int]] = {}
    for partition, key, _ in topic.all():
        homes.setdefault(key, set()).add(partition)
    assert len(homes) == 101
    assert all(len(partitions) == 1 for partitions in homes.values())


@pytest.mark.parametrize("keys", [20, 1_000])
def test_events_are_spread_evenly(keys):
    """Every partition has its share, with repeated and with distinct keys."""
    topic = events.Topic("t", 1_000, 4, keys)
    counts = [0] * 4
    for partition, _, _ in topic.all():
        counts[partition] += 1
    assert counts == [250] * 4


def test_distinct_keys_are_distinct():
    """As many keys as events."""
    topic = events.Topic("t", 1_000, 4, 1_000)
    assert len({key for _, key, _ in topic.all()}) == 1_000


@pytest.mark.parametrize("size", [200, 10_000])
def test_events_have_their_size(size):
    """Two hundred bytes are two hundred bytes, and JSON."""
    value = events.user("user-00000001", 5, size)
    assert len(value) == size
    assert json.loads(value)["seq"] == 5
    sent = sender.body(3, 17, size)
    assert len(sent) == size
    assert json.loads(sent)["part"] == 3


def test_due_times_belong_to_places():
    """The observer and the sender agree when an event was due."""
    schedule = sender.Schedule("b", "t", 3, 10.0, 100, first=1)
    for index in range(100):
        part, seq = schedule.place(index)
        assert schedule.due(part, seq) == pytest.approx(index / 10.0)


def test_small_runs_still_have_batches_to_measure():
    """The first batch is not counted, so that there must be others."""
    assert batch_events(1_000_000) == BATCH_EVENTS
    assert batch_events(100_000) == 25_000


@pytest.mark.parametrize(
    ("value", "at_least", "holds"),
    [(0.9, True, True), (0.8, True, False), (0.8, False, True), (0.9, False, False)],
)
def test_aims_have_a_direction(value, at_least, holds):
    """Speed must be above its aim, memory below."""
    assert Finding("f", value, 0.85, at_least=at_least).holds is holds


OUTCOMES = [
    Outcome(
        "throughput",
        "Throughput",
        [
            {
                "partitions": 4,
                "keys": "repeated",
                "contestant": name,
                "title": f"<{name}> & co",
                "events_per_second": rate,
                "cpu_seconds_per_million": {
                    "total": 6.0,
                    "contestant": 3.0,
                    "postgres": 2.0,
                    "broker": 1.0,
                },
                "sideline_is": None,
            }
            for name, rate in (("sideline", 200_000.0), ("bare", 210_000.0))
        ],
        [Finding("throughput against bare", 0.95, 0.85, unit="x")],
    ),
    Outcome(
        "latency",
        "Latency",
        [
            {
                "rate": 1000,
                "partitions": 2,
                "contestant": "sideline",
                "title": "sideline",
                "p50_ms": 3.5,
                "p99_ms": 26.0,
                "worst_ms": 80.0,
            }
        ],
        [],
    ),
]


def test_picture_is_well_formed_and_in_proportion():
    """The longest bar is the fastest; names with special characters do not break it."""
    root = ET.fromstring(picture.draw(OUTCOMES))
    bars = root.findall("{http://www.w3.org/2000/svg}rect")
    widths = [int(bar.attrib["width"]) for bar in bars]
    assert widths[0] == pytest.approx(widths[1] * 200 / 210, abs=1)
    assert [bar.attrib["class"] for bar in bars][:2] == ["ours", "theirs"]
    assert len(bars) == 4


def test_results_survive_the_file(tmp_path):
    """What was written is what is read."""
    path = tmp_path / "deep" / "results.json"
    report.write(path, {"cores": 2}, OUTCOMES)
    assert report.read(path) == ({"cores": 2}, OUTCOMES)


def test_a_missing_ratio_is_a_dash():
    """A contestant that ran alone has no ratio."""
    cells = report.cells("throughput", OUTCOMES[0].rows[0])
    assert cells[3] == "200,000"
    assert cells[-1] == "-"


def test_publishing_replaces_the_figures_and_nothing_else():
    """What was measured anew stands in its old place; other suites and all words stay."""
    old = "### Throughput: 5 events\n\nold\n\n### Memory: of a worker\n\nkept\n"
    page = f"# Head\n{publish.BEGIN}\n{old}\n{publish.END}\ntail\n"
    assert publish.replaced(page, []) == page
    new, more = "### Throughput: 7 events\n\nnew\n", "### Copies\n\nfirst\n"
    once = publish.replaced(page, [new, more])
    figures = f"{new}\n### Memory: of a worker\n\nkept\n\n{more}"
    assert once == f"# Head\n{publish.BEGIN}\n{figures}\n{publish.END}\ntail\n"


def test_published_tables_have_all_rows_and_aims():
    """Misses are shown as plainly as hits."""
    machine = {
        "at": "2030-01-01T00:00:00",
        "cores": 2,
        "processor": "P",
        "memory_gb": 1,
        "system": "S",
        "postgresql": {"server_version": "18"},
        "python": "3",
        "java": "J",
        "packages": {"pyspark": "4"},
        "load_average": [0.1],
        "load_average_after": [0.2],
    }
    missed = Finding("throughput against bare", 0.5, 0.85, unit="x")
    outcome = Outcome("throughput", "T", OUTCOMES[0].rows, [missed])
    text = publish.section(machine, outcome)
    assert "| 4 | repeated | <bare> & co | 210,000 | 6.0 |" in text
    assert "| throughput against bare | 0.50x | at least 0.85x | **missed** |" in text


@pytest.mark.parametrize("version", [events.TIME_ORDERED, events.RANDOM])
def test_message_ids_are_uuids_of_their_version(version):
    """Each event has its own; those that grow with time do."""
    topic = events.Topic("ids", 100, 1, 10, ids=version)
    found = [dict(topic.headers(index) or ())["message-id"] for index in range(0, 100, 10)]
    parsed = [uuid.UUID(one.decode()) for one in found]
    assert {one.version for one in parsed} == {version}
    assert len(set(found)) == len(found)
    assert version == events.RANDOM or found == sorted(found)
