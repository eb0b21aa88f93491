"""The parts of the client that need no socket: delays, shares, progress, properties, receipts, records."""

import gc
import importlib
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from datetime import UTC, datetime
from pathlib import Path
from threading import Semaphore

import pytest
from hypothesis import given
from hypothesis import strategies as st

import postdate
from postdate import client
from postdate.client import backlog as client_backlog
from postdate.client.backlog import (
    BYTES_MAX,
    Backlog,
    Delivery,
    Origin,
    OwnedQueue,
    Progress,
    Pull,
    PulledDelivery,
    QueueTurn,
    Turn,
    readable_properties,
)
from postdate.client.connection import Address, parse_address, parse_addresses
from postdate.client.errors import BrokerError, Pause, Unavailable, in_words, refusal
from postdate.client.identity import new_client_id, new_unique_keys
from postdate.client.options import Wanted
from postdate.client.outgoing import BATCH_BYTES_MAX, Outgoing, Receipt, Sealed, frames_of, receipts, seal
from postdate.client.received import BODY_BYTES_MAX, ReceivedMessage, decompress
from postdate.client.routes import readable_queues, targets_of
from postdate.clock import ManualClock
from postdate.errors import FlowControl, IllegalMessage, PostdateError, ProtocolError, UsageError
from postdate.message import LOOPBACK, Host, Message, decode_properties, encode_properties
from postdate.spans import Delay, instant
from postdate.storage import record as stored
from postdate.wire.allocation import allocate
from postdate.wire.bodies import Broker, QueueData, QueueName, Route
from postdate.wire.frame import Command
from postdate.wire.records import Record, decode_records, join_pieces, split_records
from tests.support.handles import recall_handle
from tests.support.server import WAIT_S

# -- the package


def test_the_package_gives_the_names_of_the_client() -> None:
    assert sorted(postdate.__all__) == sorted([*client.__all__, "pending"])
    for name in client.__all__:
        assert getattr(postdate, name) is getattr(client, name)


def test_importing_the_package_loads_neither_event_loops_nor_sockets() -> None:
    script = "import sys, postdate, postdate.errors; print(sorted({'asyncio', 'socket', 'numpy'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"


def test_the_package_tells_type_checkers_that_it_has_types() -> None:
    assert (Path(postdate.__file__).parent / "py.typed").is_file()


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = postdate.conect  # type: ignore[attr-defined]


# -- addresses


def test_addresses_are_read_as_rocketmq_writes_them() -> None:
    assert parse_addresses(" a:1 ; 10.0.0.1:9876;") == (Address("a", 1), Address("10.0.0.1", 9876))
    assert parse_address("[::1]:9876") == Address("::1", 9876)
    assert str(Address("::1", 9876)) == "[::1]:9876"


@pytest.mark.parametrize("text", ["", ";", "host", "host:", ":9876", "host:0", "host:65536", "host:x", "a:1;b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the address is"):
        parse_addresses(text)


# -- shares


@pytest.mark.parametrize(
    ("queue_count", "member_count", "shares"),
    [(8, 3, [3, 3, 2]), (4, 4, [1, 1, 1, 1]), (2, 3, [1, 1, 0]), (7, 2, [4, 3]), (0, 2, [0, 0]), (1, 1, [1])],
)
def test_queues_are_shared_out_evenly(queue_count: int, member_count: int, shares: list[int]) -> None:
    members = [f"m{n}" for n in range(member_count)]
    given_out = [allocate(member, members[::-1], range(queue_count)) for member in members]
    assert [len(share) for share in given_out] == shares
    assert [queue for share in given_out for queue in share] == list(range(queue_count))


def java_averagely(index: int, member_count: int, queue_count: int) -> list[int]:
    """RocketMQ's rule as its documentation tells it, step by step."""
    rest = queue_count % member_count
    size = (
        1
        if queue_count <= member_count
        else queue_count // member_count + (1 if rest > 0 and index < rest else 0)
    )  # fmt: skip
    start = index * size if rest > 0 and index < rest else index * size + rest
    return [(start + n) % queue_count for n in range(min(size, queue_count - start))]


@given(queue_count=st.integers(0, 40), member_count=st.integers(1, 12))
def test_the_shares_are_those_that_java_members_compute(queue_count: int, member_count: int) -> None:
    members = [f"m{n:02}" for n in range(member_count)]
    for index, member in enumerate(members):
        assert list(allocate(member, members, range(queue_count))) == java_averagely(index, member_count, queue_count)


def test_who_is_no_member_gets_nothing() -> None:
    assert list(allocate("x", ["a", "b"], range(4))) == []


# -- routes


def test_targets_alternate_between_brokers_and_leave_out_what_cannot_be_written() -> None:
    route = Route(
        [Broker("b", "c", "10.0.0.2:10911"), Broker("a", "c", "10.0.0.1:10911")],
        [QueueData("b", 2, 2, 6), QueueData("a", 2, 1, 6), QueueData("a", 2, 1, 4), QueueData("gone", 1, 1, 6)],
    )
    assert [(target.broker_name, target.queue_id) for target in targets_of(route)] == [("a", 0), ("b", 0), ("b", 1)]


def test_readable_queues_are_sorted_and_leave_out_what_cannot_be_read() -> None:
    route = Route([], [QueueData("b", 1, 1, 6), QueueData("a", 2, 1, 4), QueueData("c", 2, 2, 2)])
    assert readable_queues("t", route) == [QueueName("t", "a", 0), QueueName("t", "a", 1), QueueName("t", "b", 0)]


# -- progress


def test_the_offset_to_commit_is_the_smallest_one_not_acknowledged() -> None:
    progress = Progress(7)
    assert progress.commit_offset == 7
    progress.pulled([7, 8, 9], 10)
    assert progress.commit_offset == 7
    progress.acknowledge(7)
    assert progress.commit_offset == 8
    progress.acknowledge(8)
    progress.acknowledge(7)
    assert (progress.commit_offset, progress.is_acknowledged(8), progress.is_acknowledged(9)) == (9, True, False)
    progress.acknowledge(9)
    progress.acknowledge(9)
    assert (progress.commit_offset, progress.position) == (10, 10)


def test_messages_that_nobody_wants_are_passed_over() -> None:
    progress = Progress(0)
    progress.pulled([], 32)
    assert progress.commit_offset == 32
    progress.pulled([40], 64)
    assert progress.commit_offset == 40
    progress.pulled([], 96)
    assert progress.commit_offset == 40
    progress.acknowledge(40)
    assert progress.commit_offset == 96


@given(st.lists(st.tuples(st.sampled_from(["pull", "acknowledge", "again"]), st.integers(0, 3)), max_size=60))
def test_nothing_beyond_an_open_message_is_ever_committed(steps: list[tuple[str, int]]) -> None:
    progress, open_offsets, done = Progress(0), list[int](), 0
    for step, number in steps:
        if step == "pull":  # so many messages, each behind one that nobody wants, and one more of those at the end
            offsets = [progress.position + 1 + 2 * index for index in range(number)]
            progress.pulled(offsets, progress.position + 2 * number + 1)
            open_offsets += offsets
        elif step == "again":
            progress.acknowledge(done)
        elif open_offsets:
            done = open_offsets.pop(0)
            progress.acknowledge(done)
        if not open_offsets:
            assert progress.commit_offset == progress.position
        else:
            assert done < progress.commit_offset <= open_offsets[0] or (done, progress.commit_offset) == (0, 1)


# -- the backlog


def owned(queue_id: int) -> OwnedQueue:
    return OwnedQueue(QueueName("t", "b", queue_id), Address("h", 1), Progress(0), None)


def origin_of(delivery: Delivery) -> Origin:
    assert isinstance(delivery, PulledDelivery)
    return delivery.origin


def pull_of(queue: OwnedQueue, *offsets: int, size: int = 100) -> Pull:
    return Pull(queue, split_records(b"".join(record(queue_offset=offset) for offset in offsets)), size)


def record(*, sys_flag: int = 0, body: bytes = b"x", queue_offset: int = 0, topic: str = "t",
           **properties: str) -> bytes:  # fmt: skip
    message = Message(
        topic, body, encode_properties(properties), queue_id=3, sys_flag=sys_flag, born_at_ms=1_000, reconsume_times=2
    )
    data = bytearray(stored.encode(message, topic.encode(), 0, 0, LOOPBACK))
    stored.deliver(data, [(0, queue_offset, 99, 2_000)])
    return bytes(data)


def new_backlog(prefetch: int = 1_000) -> tuple[Backlog, list[OwnedQueue]]:
    """A backlog, and the queues that it told to be pulled again."""
    roomy: list[OwnedQueue] = []
    return Backlog(prefetch, roomy.append), roomy


def put(backlog: Backlog, queue: OwnedQueue, *offsets: int, size: int = 100) -> None:
    backlog.put(pull_of(queue, *offsets, size=size), offsets[-1] + 1)


def taken(backlog: Backlog, done: Turn | None = None) -> QueueTurn:
    turn = backlog.take(done)
    assert isinstance(turn, QueueTurn)
    return turn


def offsets_of(deliveries: Iterable[Delivery]) -> list[int]:
    return [each.queue_offset for each in deliveries]


@pytest.fixture
def turn_clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """What turns are measured by: it stands still until it is moved."""
    clock = ManualClock()
    monkeypatch.setattr(client_backlog, "elapsed_ns", clock.elapsed_ns)
    return clock


@pytest.mark.usefixtures("turn_clock")
def test_queues_take_turns_and_each_is_given_to_one_at_a_time() -> None:
    backlog, _ = new_backlog()
    first, second = owned(0), owned(1)
    put(backlog, first, 0, 1)
    put(backlog, second, 0, 1)
    one, other = taken(backlog), taken(backlog)
    assert (one.queue, other.queue, backlog.take()) == (first, second, None)
    for each in other:
        each.settle()
    assert next(iter(one)).queue_offset == 0
    assert (first.progress.commit_offset, second.progress.commit_offset) == (0, 2)
    put(backlog, second, 2)
    assert not backlog.is_ready
    assert taken(backlog, other).queue is second


def test_who_keeps_one_message_does_not_keep_those_that_came_with_it() -> None:
    backlog, _ = new_backlog()
    put(backlog, owned(0), 0, 1)
    kept, *_ = taken(backlog)
    assert not [each for each in gc.get_referents(kept, *gc.get_referents(kept)) if isinstance(each, Pull)]


def test_a_pull_that_brings_nothing_wakes_nobody() -> None:
    backlog, _ = new_backlog()
    queue = owned(0)
    backlog.put(pull_of(queue), 5)
    assert (backlog.is_ready, queue.progress.commit_offset) == (False, 5)


@pytest.mark.usefixtures("turn_clock")
def test_a_queue_that_grows_goes_on_giving_within_its_turn() -> None:
    backlog, _ = new_backlog()
    queue = owned(0)
    put(backlog, queue, 0)
    turn = iter(taken(backlog))
    assert next(turn).queue_offset == 0
    put(backlog, queue, 1, 2)
    put(backlog, queue, 3)
    assert offsets_of(turn) == [1, 2, 3]


def test_who_works_long_on_a_message_gets_the_next_from_another_queue(turn_clock: ManualClock) -> None:
    backlog, _ = new_backlog()
    for number in range(2):
        put(backlog, owned(number), 0, 1)
    order, turn = [], backlog.take()
    while turn is not None:
        for each in turn:
            order.append((origin_of(each).queue.name.queue_id, each.queue_offset))
            turn_clock.pass_ms(1)
        turn = backlog.take(turn)
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_dropped_queue_gives_nothing_more() -> None:
    backlog, _ = new_backlog()
    queue = owned(0)
    put(backlog, queue, 0, 1, 2)
    turn = taken(backlog)
    messages = iter(turn)
    first = next(messages)
    backlog.drop(queue)
    first.settle()
    assert next(messages, None) is None
    assert backlog.take(turn) is None
    assert (queue.progress.commit_offset, queue.waiting_count) == (1, 0)


@pytest.mark.usefixtures("turn_clock")
def test_an_ended_backlog_ends_the_turns_that_are_taken() -> None:
    backlog, _ = new_backlog()
    queue = owned(0)
    put(backlog, queue, 0, 1)
    put(backlog, queue, 2)
    messages = iter(taken(backlog))
    assert next(messages).queue_offset == 0
    backlog.end()
    assert next(messages, None) is None
    assert queue.progress.commit_offset == 0


@pytest.mark.usefixtures("turn_clock")
def test_a_full_queue_is_pulled_again_when_half_of_it_is_gone() -> None:
    backlog, roomy = new_backlog(prefetch=8)
    backlog.share_among(2)
    queue = owned(0)
    assert [backlog.count_to_pull(queue, batch) for batch in (3, 32)] == [3, 4]
    put(backlog, queue, 0, 1, 2)
    assert (queue.is_full, backlog.count_to_pull(queue, 32)) == (False, 1)
    put(backlog, queue, 3)
    assert queue.is_full
    turn = taken(backlog)
    messages = iter(turn)
    next(messages)
    assert (queue.is_full, roomy, queue.waiting_count) == (True, [], 3)
    next(messages)
    backlog.take(turn)
    assert (queue.is_full, roomy, queue.waiting_count) == (False, [queue], 2)


def test_a_queue_that_may_keep_one_message_is_pulled_while_that_is_worked_on() -> None:
    backlog, roomy = new_backlog(prefetch=1)
    queue = owned(0)
    put(backlog, queue, 0)
    assert queue.is_full
    taken(backlog)
    assert (queue.is_full, roomy) == (False, [queue])


@pytest.mark.usefixtures("turn_clock")
def test_a_queue_is_full_by_bytes_until_the_pulls_that_brought_them_are_gone() -> None:
    backlog, roomy = new_backlog()
    queue = owned(0)
    put(backlog, queue, 0, 1, size=BYTES_MAX)
    was_full = queue.is_full
    put(backlog, queue, 2, size=1)
    assert (was_full, queue.is_full) == (False, True)
    turn = taken(backlog)
    messages = iter(turn)
    assert [next(messages).queue_offset, next(messages).queue_offset] == [0, 1]
    assert (queue.is_full, roomy) == (True, [])
    assert taken(backlog, turn).queue is queue
    assert (queue.is_full, roomy) == (False, [queue])


def test_a_step_forward_keeps_what_waits_and_a_step_back_forgets_it() -> None:
    backlog, _ = new_backlog()
    queue = owned(0)
    put(backlog, queue, 5, 6)
    assert backlog.move(queue, 9)
    assert (backlog.is_ready, queue.progress.commit_offset, queue.progress.position) == (True, 5, 9)
    assert not backlog.move(queue, 3)
    assert (backlog.is_ready, queue.progress.commit_offset, queue.progress.position) == (False, 3, 3)


@pytest.mark.usefixtures("turn_clock")
def test_what_was_handed_out_of_a_queue_that_is_no_more_does_not_acknowledge_its_namesake() -> None:
    backlog, _ = new_backlog()
    queue = owned(0)
    put(backlog, queue, 0, 1)
    messages = iter(taken(backlog))
    old = next(messages)
    backlog.move(queue, 0)
    put(backlog, queue, 0)
    old.settle()
    assert origin_of(next(messages)).progress is queue.progress
    assert queue.progress.commit_offset == 0


def in_thread(work: Callable[[], object]) -> "Future[object]":
    """The result of something that waits, when it comes."""
    result: Future[object] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def test_a_thread_that_waits_gets_what_is_put() -> None:
    backlog, _ = new_backlog()
    queue = owned(0)
    waiting = in_thread(lambda: queue_of(backlog.take_within(WAIT_S)))
    put(backlog, queue, 0)
    assert waiting.result(WAIT_S) is queue


def queue_of(turn: Turn | None) -> OwnedQueue | None:
    assert turn is None or isinstance(turn, QueueTurn)
    return None if turn is None else turn.queue


def test_of_many_threads_that_wait_each_gets_its_queue_and_at_the_end_all_end() -> None:
    backlog, _ = new_backlog()
    queues = [owned(number) for number in range(4)]
    waiting = [in_thread(lambda: queue_of(backlog.take_within(WAIT_S))) for _ in range(6)]
    for queue in queues:
        put(backlog, queue, 0)
    until_done(waiting, 4)
    backlog.end()
    assert backlog.take_within(WAIT_S) is None
    found = [each.result(WAIT_S) for each in waiting]
    assert sorted(map(id, filter(None, found))) == sorted(map(id, queues))
    assert found.count(None) == 2


def until_done(futures: list["Future[object]"], count: int) -> None:
    for number, _ in enumerate(as_completed(futures, WAIT_S), 1):
        if number == count:
            return


def test_a_wait_that_was_in_vain_is_not_counted() -> None:
    backlog, _ = new_backlog()
    queues = [owned(number) for number in range(2)]
    assert backlog.take_within(0.001) is None
    for queue in queues:
        put(backlog, queue, 0)
    turn = backlog.take_within(0)
    assert queue_of(turn) is queues[0]
    assert queue_of(backlog.take_within(0, turn)) is queues[1]


def test_a_failure_is_raised_by_all_who_wait() -> None:
    backlog, _ = new_backlog()
    waiting = in_thread(lambda: backlog.take_within(WAIT_S))
    backlog.end(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours"):
        waiting.result(WAIT_S)
    with pytest.raises(ZeroDivisionError, match="ours"):
        backlog.take()


@pytest.mark.parametrize("turn_ns", [0, 1_000_000])
def test_threads_that_hammer_a_backlog_keep_the_order_of_each_queue(
    turn_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_backlog, "TURN_NS", turn_ns)
    backlog, _ = new_backlog()
    queues = [owned(number) for number in range(3)]
    handled: dict[int, list[int]] = {number: [] for number in range(3)}
    left = Semaphore(0)

    def work() -> None:
        turn: Turn | None = None
        while not backlog.has_ended:
            turn = backlog.take_within(WAIT_S, turn)
            for each in turn or ():
                handled[origin_of(each).queue.name.queue_id].append(each.queue_offset)
                each.settle()
                left.release()

    workers = [in_thread(work) for _ in range(5)]
    for start in range(0, 300, 10):
        for queue in queues:
            put(backlog, queue, *range(start, start + 10))
    assert all(left.acquire(timeout=WAIT_S) for _ in range(900))
    backlog.end()
    for worker in workers:
        worker.result(WAIT_S)
    assert handled == {number: list(range(300)) for number in range(3)}
    assert [queue.progress.commit_offset for queue in queues] == [300, 300, 300]


# -- messages to send


def sealed_properties(**wishes: object) -> dict[str, str]:
    return decode_properties(seal(Outgoing(b"x", **wishes), "U1").properties)  # type: ignore[arg-type]


def test_wishes_become_properties() -> None:
    assert sealed_properties() == {"UNIQ_KEY": "U1", "WAIT": "true"}
    assert sealed_properties(key=["k1", "k2"], tag="paid", properties={"colour": "red"}) == {
        "colour": "red", "UNIQ_KEY": "U1", "WAIT": "true", "KEYS": "k1 k2", "TAGS": "paid",
    }  # fmt: skip
    assert sealed_properties(delay="30m")["TIMER_DELAY_MS"] == "1800000"
    assert sealed_properties(at=datetime(2027, 1, 15, 8, tzinfo=UTC))["TIMER_DELIVER_MS"] == "1800000000000"
    assert sealed_properties(level=3)["DELAY"] == "3"
    assert "TIMER_DELAY_MS" not in sealed_properties(delay=0)


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"delay": "1s", "level": 1}, "at most one"),
        ({"delay": "1s", "at": datetime(2027, 1, 15, tzinfo=UTC)}, "at most one"),
        ({"level": 0}, "level is 0"),
        ({"level": True}, "level is True"),
        ({"properties": {"TAGS": "x"}}, "use the argument tag"),
        ({"properties": {"TIMER_DELAY_SEC": "1"}}, "use the argument delay"),
        ({"properties": {"__STARTDELIVERTIME": "1"}}, "use the argument at"),
        ({"properties": {"UNIQ_KEY": "x"}}, "set by the client itself"),
    ],
)
def test_contradictions_are_the_callers_fault(wishes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        sealed_properties(**wishes)


def test_what_no_broker_would_take_is_refused_before_it_is_sent() -> None:
    with pytest.raises(IllegalMessage, match="separator"):
        sealed_properties(key="a\x01b")
    with pytest.raises(IllegalMessage, match="properties have"):
        sealed_properties(properties={"long": "x" * 40_000})
    with pytest.raises(IllegalMessage, match="a frame has room"):
        seal(Outgoing(bytes(17_000_000)), "U1")
    with pytest.raises(UsageError, match="expected bytes or str"):
        seal(Outgoing(7), "U1")  # type: ignore[arg-type]


def test_a_batch_is_cut_by_count_and_by_size() -> None:
    small = [Sealed(f"U{n}", b"x", b"", False) for n in range(2_500)]
    assert [len(frame) for frame in frames_of(small)] == [1_000, 1_000, 500]
    large = [Sealed(f"U{n}", bytes(400_000), b"", False) for n in range(5)]
    assert [len(frame) for frame in frames_of(large)] == [2, 2, 1]
    huge = [Sealed("U", bytes(BATCH_BYTES_MAX + 1), b"", False)]
    assert [len(frame) for frame in frames_of(huge)] == [1]
    assert list(frames_of([])) == []


# -- receipts


def test_a_receipt_prints_what_a_cancel_needs() -> None:
    handle = recall_handle("t", "b", 1_800_000_000_000, "U1")
    (receipt,) = receipts("t", [Sealed("U1", b"", b"", True)], {"msgId": "M", "queueId": "2", "recallHandle": handle})
    assert receipt == Receipt("t", "U1", "M", 2, None, 1_800_000_000_000, handle)
    assert str(receipt) == handle
    assert str(Receipt("t", "U1", "M", 2, 7, None, None)) == "U1"


def test_receipts_of_a_batch_tell_the_offsets_that_are_known() -> None:
    handle = recall_handle("t", "b", 5_000, "U1")
    messages = [Sealed("U0", b"", b"", False), Sealed("U1", b"", b"", True), Sealed("U2", b"", b"", False)]
    answer = {"msgId": "A,B,C", "queueId": "1", "queueOffset": "7", "recallHandles": f"- {handle} -"}
    found = receipts("t", messages, answer)
    assert [receipt.queue_offset for receipt in found] == [7, None, 8]
    assert [receipt.offset_id for receipt in found] == ["A", "B", "C"]
    assert [receipt.handle for receipt in found] == [None, handle, None]
    found = receipts("t", messages[1:], answer | {"msgId": "B,C", "recallHandles": f"{handle} -"})
    assert [receipt.queue_offset for receipt in found] == [None, None]


def test_receipts_of_rocketmq_have_no_handles_in_a_batch() -> None:
    messages = [Sealed("U0", b"", b"", True), Sealed("U1", b"", b"", True)]
    found = receipts("t", messages, {"msgId": "A,B", "queueId": "1", "queueOffset": "7"})
    assert [receipt.handle for receipt in found] == [None, None]


# -- records and messages that came


def test_records_of_an_answer_are_read() -> None:
    message = Message("orders", b"body", encode_properties({"KEYS": "k"}), queue_id=2, born_at_ms=5, reconsume_times=1)
    v6 = message._replace(born_host=Host(bytes(16), 7), topic="%RETRY%" + "g" * 120 + "h" * 20)
    data = b"".join(
        stored.encode(each, each.topic.encode(), 4_096, 9, host)
        for each, host in ((message, LOOPBACK), (v6, Host(b"\1" * 16, 8)))
    )
    first, second = decode_records(data)
    assert all_joined(data) == [first, second]
    assert first == stored.decode(stored.encode(message, b"orders", 4_096, 9, LOOPBACK))
    assert (first.queue_id, first.offset, first.stored_at_ms, first.body) == (2, 4_096, 9, b"body")
    assert (second.topic, second.store_host, second.sys_flag) == (v6.topic, Host(b"\1" * 16, 8), 48)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:-3], "are left"),
        (lambda data: data[:50], "50 are left"),
        (lambda data: data + b"\0", "has a size of 0 bytes, 1 are left"),
        (lambda data: data[:4] + b"\0\0\0\0" + data[8:], "magic"),
        (lambda data: data[:3] + b"\0" + data[4:], "has a size of"),
        (lambda data: data[:8] + b"\0\0\0\0" + data[12:], "crc"),
        (lambda data: data[:84] + b"\0\0\1\0" + data[88:], "256 bytes of body"),
        (lambda data: data[:84] + b"\xff\0\0\0" + data[88:], "bytes of body"),
        (lambda data: data[:92] + b"\x50" + data[93:], "80 bytes of topic"),
        (lambda data: data[:92] + b"\x86" + data[93:], "-122 bytes of topic"),
        (lambda data: data[:93] + b"\xff" + data[94:], "topic is not UTF-8"),
        (lambda data: data[:99] + b"\0\1", "1 bytes of properties"),
    ],
)
@pytest.mark.parametrize("read", [decode_records, split_records])
def test_records_that_are_none_are_the_peers_fault(
    read: Callable[[bytes], object], damage: Callable[[bytes], bytes], sentence: str
) -> None:
    data = stored.encode(Message("orders", b"body"), b"orders", 0, 0, LOOPBACK)
    with pytest.raises(ProtocolError, match=sentence):
        read(damage(data))
    with pytest.raises(ProtocolError, match=sentence):
        read(data + damage(data))


def test_records_whose_properties_are_longer_than_any_may_be_are_the_peers_fault() -> None:
    data = stored.encode(Message("orders", b"body"), b"orders", 0, 0, LOOPBACK)[4:-2]
    data += b"\xff\xff" + bytes(0xFFFF)
    data = (len(data) + 4).to_bytes(4, "big") + data
    with pytest.raises(ProtocolError, match="-1 bytes of properties"):
        split_records(data)


@given(st.data())
def test_records_that_are_split_are_those_that_are_read(data: st.DataObject) -> None:
    """Whatever bytes come: either both ways of reading give the same, or both refuse them."""
    wishes = st.tuples(st.binary(max_size=20), st.sampled_from(["t", "töpic", "x" * 140]), st.sampled_from([4, 16]))
    messages = data.draw(st.lists(wishes, max_size=4))
    answer = bytearray()
    for body, topic, address_bytes in messages:
        host = Host(bytes(address_bytes), 1)
        message = Message(topic, body, encode_properties({"KEYS": "k"}), born_host=host)
        answer += stored.encode(message, topic.encode(), 7, 9, LOOPBACK)
    if answer:
        for place in data.draw(st.lists(st.integers(0, len(answer) - 1), max_size=2)):
            answer[place] = data.draw(st.integers(0, 255))
    assert read_or_refused(all_joined, bytes(answer)) == read_or_refused(decode_records, bytes(answer))


def all_joined(data: bytes) -> list[Record]:
    return [join_pieces(pieces) for pieces in zip(*split_records(data), strict=True)]


def read_or_refused(read: Callable[[bytes], list[Record]], answer: bytes) -> list[Record] | str:
    try:
        return read(answer)
    except ProtocolError as error:
        return str(error)


class NobodysMessages:
    def acknowledge(self, delivery: Delivery) -> None:
        raise NotImplementedError

    def retry(self, delivery: Delivery, delay: Delay | None) -> None:
        raise NotImplementedError


def received(data: bytes) -> ReceivedMessage:
    pull = Pull(owned(3), split_records(data), len(data))
    return ReceivedMessage(PulledDelivery(pull.origin, next(pull.rest)), NobodysMessages())


def test_a_message_tells_what_its_record_says() -> None:
    message = received(record(UNIQ_KEY="U1", KEYS="a b", TAGS="paid", TIMER_DELIVER_MS="1500", colour="red"))
    assert (message.id, message.key, message.keys, message.tag) == ("U1", "a", ["a", "b"], "paid")
    assert (message.topic, message.body, message.queue_id, message.queue_offset, message.attempt) == (
        "t",
        b"x",
        3,
        0,
        3,
    )
    assert (message.born_at, message.stored_at, message.due_at) == (instant(1_000), instant(2_000), instant(1_500))
    assert message.properties["colour"] == "red"
    assert repr(message) == "<ReceivedMessage U1 of t, queue 3 offset 0>"


def test_a_message_of_another_client_says_when_it_was_due() -> None:
    assert received(record(__STARTDELIVERTIME="1500")).due_at == instant(1_500)


def test_a_message_without_properties_has_none() -> None:
    message = received(record())
    assert (message.key, message.keys, message.tag, message.due_at) == (None, [], None, None)
    assert message.id == message.offset_id == "7F000001000000000000000000000063"


def test_a_retried_message_has_the_topic_it_was_sent_to() -> None:
    assert received(record(topic="%RETRY%g", RETRY_TOPIC="orders")).topic == "orders"


@pytest.mark.parametrize("sys_flag", [0x001, 0x301])
def test_a_body_compressed_by_zlib_is_unfolded(sys_flag: int) -> None:
    assert received(record(sys_flag=sys_flag, body=zlib.compress(b"long" * 2_000))).body == b"long" * 2_000


@pytest.mark.parametrize(
    ("sys_flag", "body", "sentence"),
    [
        (0x001, b"nonsense", "cannot be read"),
        (0x001, zlib.compress(b"long" * 2_000)[:-4], "cut off"),
        (0x001, zlib.compress(bytes(BODY_BYTES_MAX + 1)), "more than"),
        (0x401, b"", "not known: 4"),
    ],
)
def test_a_body_that_cannot_be_unfolded_is_named(sys_flag: int, body: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        decompress(body, sys_flag)


def compressed(sys_flag: int, body: bytes) -> bytes:
    """By one of the modules that a user installs if it is needed; here they are tools of the tests."""
    if sys_flag == 0x101:
        return bytes(importlib.import_module("lz4.frame").compress(body))
    return bytes(importlib.import_module("zstandard").ZstdCompressor().compress(body))


@pytest.mark.parametrize("sys_flag", [0x101, 0x201])
def test_a_body_compressed_by_a_module_is_unfolded_or_named(sys_flag: int) -> None:
    assert decompress(compressed(sys_flag, b"long" * 2_000), sys_flag) == b"long" * 2_000
    with pytest.raises(ProtocolError, match="cut off"):
        decompress(compressed(sys_flag, b"long" * 2_000)[:-6], sys_flag)
    with pytest.raises(ProtocolError, match="more than"):
        decompress(compressed(sys_flag, bytes(BODY_BYTES_MAX + 1)), sys_flag)
    with pytest.raises(ProtocolError, match="cannot be read"):
        decompress(b"nonsense", sys_flag)


@pytest.mark.parametrize(("sys_flag", "module"), [(0x101, "lz4"), (0x201, "zstandard")])
def test_a_body_that_needs_a_module_says_which(sys_flag: int, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.frame", None)
    with pytest.raises(ProtocolError, match=f"pip install {module}"):
        decompress(b"", sys_flag)


def test_properties_that_are_no_utf8_do_not_stop_a_queue() -> None:
    assert readable_properties(b"KEYS\x01k\xff\x02") == {"KEYS": "k�"}


# -- the rest


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted("or ders", "g"),
        Wanted("orders", ""),
        Wanted("orders", "g", from_="middle"),  # type: ignore[arg-type]
        Wanted("orders", "g", batch=0),
        Wanted("orders", "g", prefetch=0),
        Wanted("orders", "g", attempts_max=0),
    ],
)
def test_a_consumer_that_cannot_be_is_refused(wanted: Wanted) -> None:
    with pytest.raises((UsageError, IllegalMessage)):
        wanted.check()


def test_codes_become_errors_with_the_brokers_sentence() -> None:
    def error(code: int) -> PostdateError:
        return refusal(Command(code, {}, remark="because"))

    assert [type(error(code)) for code in (2, 13, 14)] == [FlowControl, IllegalMessage, Unavailable]
    assert str(error(2)) == "because"
    unknown = error(4711)
    assert isinstance(unknown, BrokerError)
    assert (unknown.code, unknown.sentence) == (4711, "because")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9876)"), "connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] Connect call failed"),
            "connection refused",
        ),
        (OSError("Multiple exceptions: [Errno 111] x, [Errno 101] y"), "connection refused, network is unreachable"),
        (socket.gaierror(-2, "Name or service not known"), "name or service not known"),
        (UnicodeError("label too long"), "label too long"),
    ],
)
def test_why_nobody_was_reached_is_said_in_words(error: OSError | UnicodeError, words: str) -> None:
    assert in_words(error) == words


def test_a_pause_doubles_up_to_its_limit_and_starts_again() -> None:
    pause = Pause()
    assert pause.is_fresh
    assert [round(pause.next(), 1) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    pause.reset()
    assert pause.next() == 0.1


def test_ids_have_rocketmqs_form_and_differ() -> None:
    address, _, rest = new_client_id().partition("@")
    process, _, nanoseconds = rest.partition("#")
    assert address.count(".") == 3
    assert process.isdigit()
    assert nanoseconds.isdigit()
    assert new_client_id() != new_client_id()
    assert len(new_unique_keys().next(0)) == 32
