"""Copies that are lost with their retry topic: their events get others, or are dead."""

from __future__ import annotations

import psycopg
import pytest

from sideline.ledger import resending
from sideline.topics.admin import Cluster
from tests.support import handlers
from tests.support.chain import RETRY

OVERDUE = "update sideline.events set due_at = due_at - interval '1 hour'"


def lost(chain, pipeline=None, *, execute=True):
    """What `sideline topics resend` finds, and does: (lost, unsent, sent, dead)."""
    ground = chain.ground
    pipeline = pipeline or handlers.build(**ground.options)
    with psycopg.connect(ground.database) as connection:
        cluster = Cluster({"bootstrap.servers": ground.kafka})
        found = resending.find(connection, cluster, "ground")
        done = (0, 0)
        if execute:
            done = resending.resend(connection, pipeline, found, actor="tester")
    return len(found.events), found.unsent, *done


@pytest.fixture
def waiting(chains):
    """Two events in a retry topic."""
    chain = chains(delays=["50ms"])
    chain.ground.publish([("a", "heals:1"), ("b", "fine"), ("c", "heals:1")])
    chain.run()
    chain.until_seen()
    return chain


def test_what_will_come_is_not_lost(waiting):
    """Not due, not read, or not even sent: nothing is sent a second time (F8, K23)."""
    chain, ground = waiting, waiting.ground
    assert lost(chain) == (0, 0, 0, 0)
    ground.query(OVERDUE)
    assert lost(chain) == (0, 0, 0, 0), "not read yet"
    chain.settle()
    ground.publish([("d", "heals:1")])
    ground.killed(ground.start(chain.lease(), crash_at="after-commit"))
    ground.query(OVERDUE)
    assert lost(chain) == (0, 1, 0, 0), "not sent yet"
    chain.settle()
    chain.check(dead=set())


def test_copies_of_a_topic_that_was_made_again_are_sent_again(waiting):
    """Deleted and created anew: its events get other copies, and their turn, once (F8)."""
    chain, ground = waiting, waiting.ground
    (topic,) = chain.retries
    chain.delete(topic)
    chain.make(topic, RETRY)
    ground.query("update sideline.progress set next_offset = 0 where topic = %s", topic)
    ground.query(OVERDUE)
    assert lost(chain, execute=False) == (2, 0, 0, 0)
    assert lost(chain) == (2, 0, 2, 0)
    assert lost(chain) == (0, 2, 0, 0), "again adds nothing"
    chain.settle()
    chain.check(dead=set())
    assert [len(chain.tries(offset)) for offset in range(3)] == [2, 1, 2]


def test_without_retry_topics_they_are_dead(waiting):
    """The topic is gone and so is the policy: dead in the ledger, the books balanced (F8)."""
    chain, ground = waiting, waiting.ground
    chain.delete(chain.retries[0])
    ground.query(OVERDUE)
    other = handlers.build(**ground.options | {"delays": None, "dead_letter": 1})
    assert lost(chain, other) == (2, 0, 0, 2)
    assert chain.states() == [(0, "dead", 1), (2, "dead", 1)]
    chain.check_books()


def test_events_of_a_topic_that_is_gone_wait_in_another(waiting):
    """A chain with other names: their copies go to the topic that the policy has now (F8)."""
    chain, ground = waiting, waiting.ground
    ground.query("update sideline.events set copy_topic = 'gone.before' where state = 'retrying'")
    ground.query(OVERDUE)
    assert lost(chain) == (2, 0, 2, 0)
    chain.settle()
    chain.check(dead=set())
