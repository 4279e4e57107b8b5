"""Names of a pipeline's own topics."""

import pytest

from sideline.errors import ConfigurationError, RefusedError
from sideline.topics.names import OwnTopic, TopicNames, own_topics, refuse_shared


def test_names_are_of_the_group():
    """Stash, retry and dead-letter topics are named after source topic and group (F11)."""
    own = own_topics(TopicNames(), "login", ["users"], stash=True, retries=2, dead_letter=True)
    assert own == (
        OwnTopic("users.login.stash", "stash", "users"),
        OwnTopic("users.login.retry.1", "retry", "users", 1),
        OwnTopic("users.login.retry.2", "retry", "users", 2),
        OwnTopic("users.login.dlq", "dead-letter", "users"),
    )


def test_two_groups_on_one_topic_never_share():
    """Whatever two groups are called, on one topic their names differ (F11)."""
    groups = ["login", "mail", "login.x", "a-b", "a_b"]
    names = [
        topic.name
        for group in groups
        for topic in own_topics(
            TopicNames(), group, ["users"], stash=True, retries=3, dead_letter=True
        )
    ]
    assert len(set(names)) == len(names)


def test_a_pattern_without_the_group_is_refused():
    """A pattern that leaves out the group would let two groups share a topic (F11)."""
    with pytest.raises(ConfigurationError, match=r"lacks \{group\}"):
        TopicNames(dead_letter="{topic}.dlq")


@pytest.mark.parametrize(
    "pattern",
    ["{group", "{group}.{n}", "{group}.{}", "{group!r}", "{group:>9}", "{group.name}", "{x}", None],
)
def test_a_pattern_holds_only_what_it_may(pattern):
    """Nothing but the named places is filled in: no attributes, no formats."""
    with pytest.raises(ConfigurationError):
        TopicNames(stash=pattern)


def test_patterns_can_be_chosen():
    """A team's own style of names is taken."""
    names = TopicNames(dead_letter="dlq.{group}.{topic}", retry="{group}-retry-{n}")
    own = own_topics(names, "login", ["users"], retries=2, dead_letter=True)
    assert [topic.name for topic in own] == ["login-retry-1", "login-retry-2", "dlq.login.users"]


@pytest.mark.parametrize(
    ("names", "sources", "why"),
    [
        (TopicNames(dead_letter="{group}"), ["login"], "one of its sources"),
        (TopicNames(dead_letter="{topic}.{group}"), ["a_login", "a"], "one of its sources"),
        (TopicNames(dead_letter="{group}.dlq"), ["a", "b"], "two of its own topics"),
        (TopicNames(retry="{topic}.{group}.retry"), ["a"], "two of its own topics"),
        (TopicNames(retry="{topic}.{group}.dlq"), ["a"], "two of its own topics"),
        (TopicNames(stash="{topic}_{group}.dlq"), ["a"], "two of its own topics"),
        (TopicNames(stash="{topic} {group}"), ["a"], "not a name that Kafka takes"),
        (TopicNames(), ["u" * 245], "Kafka takes 249"),
    ],
)
def test_names_that_clash_or_are_illegal_are_refused(names, sources, why):
    """No name is a source, stands twice (also in '.' and '_'), or is too long for Kafka (F11)."""
    with pytest.raises(ConfigurationError, match=why):
        own_topics(names, "login", sources, stash=True, retries=2, dead_letter=True)


def test_the_name_of_another_pipelines_topic_is_refused():
    """Group b.c on topic a and group c on topic a.b would meet in one topic (F11)."""
    mine = own_topics(TopicNames(), "c", ["a.b"], dead_letter=True)
    theirs = own_topics(TopicNames(), "b.c", ["a"], dead_letter=True)
    assert mine[0].name == theirs[0].name
    with pytest.raises(RefusedError, match=r"of pipeline .b\.c."):
        refuse_shared("c", mine, {"b.c": [topic.name for topic in theirs]})
    with pytest.raises(RefusedError, match="differs in"):
        refuse_shared("c", mine, {"x": ["a_b_c_dlq"]})
    refuse_shared("c", mine, {"c": [topic.name for topic in mine], "x": ["y.x.dlq"]})
