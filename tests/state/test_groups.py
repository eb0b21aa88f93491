"""Consumer groups and their offsets."""

import json

from postdate.state.groups import Groups


def test_an_offset_belongs_to_group_topic_and_queue() -> None:
    groups = Groups()
    groups.commit("g", "t", 0, 5)
    groups.commit("g", "t", 1, 6)
    groups.commit("h", "t", 0, 7)
    groups.commit("g", "t", 0, 4)
    assert [groups.offset(*place) for place in (("g", "t", 0), ("g", "t", 1), ("h", "t", 0))] == [4, 6, 7]
    assert groups.offset("g", "u", 0) is None
    assert groups.offset("nobody", "t", 0) is None
    assert groups.offsets("g") == {("t", 0): 4, ("t", 1): 6}
    assert groups.offsets("nobody") == {}


def test_what_is_given_out_is_a_copy() -> None:
    groups = Groups()
    groups.commit("g", "t", 0, 5)
    groups.offsets("g").clear()
    assert groups.offset("g", "t", 0) == 5


def test_deleting_a_group_or_a_topic_forgets_its_offsets() -> None:
    groups = Groups()
    groups.put("g", {"a": 1})
    for group in ("g", "h"):
        for topic in ("t", "u"):
            groups.commit(group, topic, 0, 5)
    groups.forget_topic("t")
    assert (groups.offset("g", "t", 0), groups.offset("h", "t", 0), groups.offset("g", "u", 0)) == (None, None, 5)
    groups.delete("g")
    groups.delete("nobody")
    assert (groups.settings, groups.offset("g", "u", 0), groups.offset("h", "u", 0)) == ({}, None, 5)


def test_the_state_comes_back_and_does_not_change_with_the_groups() -> None:
    groups = Groups()
    groups.put("g", {"a": 1})
    groups.commit("g", "t", 0, 5)
    state = groups.state()
    text = json.dumps(state)
    groups.put("h", {})
    groups.commit("g", "t", 1, 6)
    assert json.dumps(state) == text
    again = Groups()
    again.load(json.loads(text))
    assert again.state() == json.loads(text)
    assert again.offset("g", "t", 0) == 5
