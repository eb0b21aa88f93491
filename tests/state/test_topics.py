"""Topics and the numbers of their queues."""

import json

import pytest

from postdate.errors import TopicNotFound
from postdate.state.topics import GONE, Topics


def put(topics: Topics, name: str, count: int) -> list[int]:
    topics.put(name, count, count, 6, {})
    return topics.get(name).numbers


def test_every_queue_gets_a_number_of_its_own() -> None:
    topics = Topics()
    assert put(topics, "a", 2) == [0, 1]
    assert put(topics, "b", 1) == [2]
    assert put(topics, "a", 3) == [0, 1, 3]
    assert topics.places == [("a", 0), ("a", 1), ("b", 0), ("a", 2)]
    assert topics.target == topics.target_array.tolist() == [0, 1, 2, 3]


def test_a_shrunk_topic_sends_what_waits_to_id_mod_count_and_grows_back() -> None:
    topics = Topics()
    put(topics, "a", 5)
    put(topics, "a", 2)
    assert topics.target == topics.target_array.tolist() == [0, 1, 0, 1, 0]
    put(topics, "a", 4)
    assert topics.target == topics.target_array.tolist() == [0, 1, 2, 3, 0]
    assert topics.get("a").numbers == [0, 1, 2, 3, 4]


def test_a_queue_that_may_still_be_read_or_written_keeps_its_own() -> None:
    topics = Topics()
    put(topics, "a", 4)
    topics.put("a", 3, 1, 6, {})
    assert topics.target == [0, 1, 2, 0]
    topics.put("a", 1, 3, 6, {})
    assert topics.target == [0, 1, 2, 0]


def test_a_deleted_topics_numbers_go_nowhere_and_are_not_given_again() -> None:
    topics = Topics()
    put(topics, "a", 2)
    deleted = topics.delete("a")
    assert deleted is not None
    assert deleted.numbers == [0, 1]
    assert topics.target == topics.target_array.tolist() == [GONE, GONE]
    assert topics.delete("a") is None
    with pytest.raises(TopicNotFound, match="topic 'a' does not exist"):
        topics.get("a")
    assert put(topics, "a", 2) == [2, 3]
    assert topics.target == [GONE, GONE, 2, 3]


def test_the_state_comes_back_and_goes_on() -> None:
    topics = Topics()
    put(topics, "a", 3)
    put(topics, "b", 1)
    topics.put("a", 1, 2, 4, {"key": "value"})
    topics.delete("b")
    again = Topics()
    again.load(json.loads(json.dumps(topics.state())))
    assert again.state() == topics.state()
    assert again.target_array.tolist() == topics.target_array.tolist()
    assert again.get("a") == topics.get("a")
    assert put(again, "c", 1) == put(topics, "c", 1) == [4]


def test_a_state_does_not_change_with_the_topics() -> None:
    topics = Topics()
    put(topics, "a", 2)
    state = topics.state()
    before = json.dumps(state)
    put(topics, "b", 2)
    topics.put("a", 1, 1, 6, {"x": "y"})
    topics.delete("b")
    assert json.dumps(state) == before


def test_attributes_are_the_topics_own() -> None:
    attributes = {"a": "b"}
    topics = Topics()
    topics.put("t", 1, 1, 6, attributes)
    attributes["a"] = "c"
    assert topics.get("t").attributes == {"a": "b"}
