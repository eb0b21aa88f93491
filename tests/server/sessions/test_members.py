"""Who shares a topic: members by topic and by tags, what contradicts, and what the broker warns of."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.bodies import decode_consumer_ids
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from tests.support.core import T0
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    Peer,
    ask_json,
    connected,
    got,
    heartbeat,
    make_topic,
    pull,
    pull_command,
    sent,
)
from tests.support.server import serving

POP_FIELDS: dict[str, Any] = {"queueId": -1, "maxMsgNums": 32, "invisibleTime": 60_000}


def join(peer: Peer, client_id: str, subscriptions: Mapping[str, str], **more: Any) -> Command:
    """A heartbeat of a client of ours."""
    return heartbeat(peer, client_id, subscriptions, sharesByTopic=True, **more)


def joined(peer: Peer, client_id: str, subscriptions: Mapping[str, str], **more: Any) -> None:
    answer = join(peer, client_id, subscriptions, **more)
    assert answer.code == codes.SUCCESS, answer


def members(peer: Peer, topic: str = "") -> list[str]:
    answer = peer.ask(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=GROUP, topic=topic)
    assert answer.code == codes.SUCCESS, answer
    return sorted(decode_consumer_ids(answer.body))


def leave(peer: Peer, client_id: str) -> None:
    peer.ask(Request.UNREGISTER_CLIENT, clientID=client_id, consumerGroup=GROUP)


def warnings(peer: Peer) -> list[str]:
    shown: list[str] = ask_json(peer, Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup=GROUP)["warnings"]
    told = [each["warning"] for each in ask_json(peer, Request.GET_STATUS)["warnings"] if each["group"] == GROUP]
    assert told == shown
    return shown


def pop_command(peer: Peer, **fields: Any) -> Command:
    return peer.command(
        Request.POP_MESSAGE, **(POP_FIELDS | {"consumerGroup": GROUP, "topic": "orders", "exp": "*"} | fields)
    )


# -------------------------------------------------------------------------------------------------------- topics


def test_members_share_a_topic_with_those_that_subscribe_to_it(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        joined(peer, "a", {"orders": "*"})
        joined(peer, "b", {"mails": "*"})
        joined(peer, "c", {"orders": "*", "mails": "*"})
        assert members(peer, "orders") == ["a", "c"]
        assert members(peer, "mails") == ["b", "c"]
        assert members(peer, "nothing") == []
        assert members(peer) == ["a", "b", "c"], "as official clients ask"
        assert warnings(peer) == []


def test_beside_an_official_client_all_share_with_the_whole_group_and_the_broker_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        joined(peer, "ours", {"orders": "*", f"%RETRY%{GROUP}": "*"})
        heartbeat(peer, "java", {"mails": "*", f"%RETRY%{GROUP}": "*"})
        assert members(peer, "orders") == ["java", "ours"]
        (warning,) = warnings(peer)
        for part in (GROUP, "orders", "mails", "java", "ours"):
            assert part in warning
        for _ in range(2):
            heartbeat(peer, "java", {"mails": "*", f"%RETRY%{GROUP}": "*"})
        assert caplog.messages.count(warning) == 1, "once, not with every heartbeat"
        leave(peer, "java")
        assert warnings(peer) == []
        assert members(peer, "orders") == ["ours"]


def test_an_official_client_with_the_same_topics_is_fine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        caplog.set_level(logging.WARNING)
        joined(peer, "ours", {"orders": "paid"})
        heartbeat(peer, "java", {"orders": "paid", f"%RETRY%{GROUP}": "*"})
        assert warnings(peer) == []
        assert caplog.messages == []


# ---------------------------------------------------------------------------------------------------------- tags


def test_only_members_that_take_all_that_is_wanted_share_a_topic(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        joined(peer, "old", {"orders": "paid"})
        assert members(peer, "orders") == ["old"]
        joined(peer, "new", {"orders": "paid || refunded"})
        joined(peer, "same", {"orders": "refunded||paid"})
        assert members(peer, "orders") == ["new", "same"]
        joined(peer, "all", {"orders": "*"})
        assert members(peer, "orders") == ["all"]
        assert warnings(peer) == [], "a deployment is no conflict"


def test_tags_that_contradict_those_of_other_members_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        joined(peer, "first", {"orders": "paid"})
        refused = join(peer, "second", {"orders": "refunded"})
        assert refused.code == codes.INVALID_PARAMETER
        for part in (GROUP, "'orders'", "'paid' (first)", "'refunded'"):
            assert part in str(refused.remark)
        assert members(peer) == ["first"]
        joined(peer, "second", {"orders": "paid || refunded"})
        joined(peer, "third", {"orders": "refunded"})
        refused = join(peer, "second", {"orders": "paid"})
        assert refused.code == codes.INVALID_PARAMETER, "it would leave the others without one that takes all"
        assert members(peer, "orders") == ["second"]


def test_members_that_are_left_in_contradiction_stay_and_the_broker_warns(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        joined(peer, "all", {"orders": "*"})
        joined(peer, "a", {"orders": "paid"})
        joined(peer, "b", {"orders": "refunded"})
        leave(peer, "all")
        joined(peer, "a", {"orders": "paid"})
        assert members(peer, "orders") == []
        (warning,) = warnings(peer)
        for part in (GROUP, "orders", "'paid' (a)", "'refunded' (b)"):
            assert part in warning


def test_an_official_client_is_never_refused_but_warned_of(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        joined(peer, "ours", {"orders": "*"})
        assert heartbeat(peer, "java", {"orders": "paid"}).code == codes.SUCCESS
        (warning,) = warnings(peer)
        assert "java will leave out" in warning
        joined(peer, "ours", {"orders": "*"})
        assert heartbeat(peer, "java", {"orders": "*"}).code == codes.SUCCESS
        assert warnings(peer) == []


def test_broadcasting_consumers_are_in_nobodys_way(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        joined(peer, "ours", {"orders": "paid"})
        heartbeat(peer, "java", {"orders": "refunded"}, model="BROADCASTING")
        assert warnings(peer) == []


# ---------------------------------------------------------------------------------------------- pulls and pops wait


def test_a_wider_member_takes_over_and_the_narrower_ones_pulls_skip_nothing(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0)) as served,
        connected(served) as old,
        connected(served) as new,
        connected(served) as producer,
    ):
        make_topic(producer, "orders")
        joined(old, "old", {"orders": "paid"})
        held = pull_command(old, "orders", 0, tags="paid", wait_ms=LONG_POLL_MS)
        old.write(held)
        old.round_trip()
        joined(new, "new", {"orders": "paid || refunded"})
        sent(producer, "orders", "back", TAGS="refunded")
        sent(producer, "orders", "money", TAGS="paid")
        old.round_trip()
        asked = pull(old, "orders", 0, tags="paid")
        assert (asked.code, asked.next_offset, asked.max_offset) == (codes.PULL_NOT_FOUND, 0, 2)
        assert pull(new, "orders", 0, tags="paid || refunded").bodies == ["back", "money"]
        leave(new, "new")
        answer = got(old.answer_to(held.opaque))
        assert (answer.bodies, answer.next_offset) == (["money"], 2), "it is the widest again"


def test_a_wider_member_takes_over_and_the_narrower_ones_pops_skip_nothing(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0)) as served,
        connected(served) as old,
        connected(served) as new,
        connected(served) as producer,
    ):
        make_topic(producer, "orders")
        joined(old, "old", {"orders": "paid"}, consumeType="CONSUME_POP")
        held = pop_command(old, exp="paid", pollTime=LONG_POLL_MS)
        old.write(held)
        old.round_trip()
        joined(new, "new", {"orders": "paid || refunded"}, consumeType="CONSUME_POP")
        waiting = pop_command(new, exp="paid || refunded", pollTime=LONG_POLL_MS)
        new.write(waiting)
        new.round_trip()
        sent(producer, "orders", "back", TAGS="refunded")
        assert new.answer_to(waiting.opaque).code == codes.SUCCESS, "the pop before it is passed over"
        refused = old.ask(Request.POP_MESSAGE, **(dict(pop_command(old, exp="paid").fields)))
        assert refused.code == codes.PULL_NOT_FOUND
        sent(producer, "orders", "more", TAGS="refunded")
        sent(producer, "orders", "money", TAGS="paid")
        answer = new.ask(Request.POP_MESSAGE, **(dict(pop_command(new, exp="paid || refunded").fields)))
        assert answer.fields["msgOffsetInfo"] == "0 0 1,2"
        sent(producer, "orders", "late", TAGS="paid")
        leave(new, "new")
        assert old.answer_to(held.opaque).fields["msgOffsetInfo"] == "0 0 3"


def test_a_wider_filter_looks_again_at_what_a_narrower_one_passed_over(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "back", TAGS="refunded")
        command = pop_command(peer, exp="paid")
        assert peer.ask(Request.POP_MESSAGE, **dict(command.fields)).code == codes.PULL_NOT_FOUND
        command = pop_command(peer, exp="paid || refunded")
        assert peer.ask(Request.POP_MESSAGE, **dict(command.fields)).code == codes.SUCCESS


def test_a_status_shows_warnings_of_all_groups(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for group in ("one", "two"):
            joined(peer, "ours", {"orders": "*"}, group=group)
            heartbeat(peer, "java", {"orders": "paid"}, group=group)
        shown = orjson.loads(peer.ask(Request.GET_STATUS).body)["warnings"]
        assert [(each["group"], each["topic"], each["members"]) for each in shown] == [
            ("one", "orders", ["ours", "java"]),
            ("two", "orders", ["ours", "java"]),
        ]
