"""Key-value settings as calls: durable, bounded, and in the log only where something changes."""

import dataclasses

import pytest

from postdate.errors import FlowControl, UsageError
from postdate.state import saved
from tests.support.core import SMALL_LIMITS, T0, Data, message, send, snapshot

ORDER = "ORDER_TOPIC_CONFIG"


@pytest.mark.parametrize("ending", ["crash", "close", "snapshot and crash"])
def test_values_outlive_a_restart(data: Data, ending: str) -> None:
    broker = data.open()
    for key in ("orders", "bills", "gone"):
        broker.values.put(ORDER, key, "postdate:4", T0)
    broker.values.put(ORDER, "orders", "postdate:8 ü\n=", T0)
    broker.values.delete(ORDER, "gone", T0)
    if ending == "snapshot and crash":
        snapshot(broker)
        broker.values.put("OTHER", "orders", "", T0)
        broker.values.delete(ORDER, "bills", T0)
    (data.close if ending == "close" else data.crash)(broker)
    view = data.open().view
    expected = {"orders": "postdate:8 ü\n="}
    if ending == "snapshot and crash":
        assert (view.values_of(ORDER), view.find_value("OTHER", "orders")) == (expected, "")
    else:
        assert (view.values_of(ORDER), view.find_value("OTHER", "orders")) == (expected | {"bills": "postdate:4"}, None)


def test_what_changes_nothing_writes_nothing(data: Data) -> None:
    broker = data.open()
    broker.values.put(ORDER, "orders", "a:4", T0)
    end = broker.log.end
    broker.values.put(ORDER, "orders", "a:4", T0 + 1)
    broker.values.delete(ORDER, "bills", T0 + 1)
    broker.values.delete("nowhere", "orders", T0 + 1)
    assert broker.log.end == end
    broker.values.delete(ORDER, "orders", T0 + 1)
    assert broker.log.end > end


def test_values_are_bounded_in_number_and_size(data: Data) -> None:
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, values_max=2, definition_bytes_max=1_024))
    for key in ("a", "b"):
        broker.values.put("n", key, "x", T0)
    end = broker.log.end
    with pytest.raises(FlowControl, match="values_max: there are 2 values, the limit; delete some first"):
        broker.values.put("m", "a", "x", T0)
    with pytest.raises(UsageError, match="definition_bytes_max: namespace, key and value of 'a' take"):
        broker.values.put("n", "a", "x" * 1_024, T0)
    assert broker.log.end == end
    broker.values.put("n", "a", "other", T0)
    broker.values.delete("n", "b", T0)
    broker.values.put("m", "a", "x", T0)
    assert broker.view.find_value("n", "a") == "other"


def test_a_snapshot_of_an_earlier_version_has_no_values(data: Data) -> None:
    broker = data.open()
    state = saved._state(broker.fold)
    del state["values"]
    fold = broker._fresh_fold({"queue_file_rows": 64, "far_block_rows": 8})
    fold.values.put("n", "a", "x")
    saved._load_tables(fold, state)
    assert len(fold.values) == 0


def test_values_are_read_beside_messages(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("before"))
    broker.values.put(ORDER, "orders", "a:4", T0)
    send(broker, T0, message("after"))
    assert broker.view.find_value(ORDER, "orders") == "a:4"
