"""What waits, counted wherever it is on its way: far queue, table, wheel. The sum is what waits, at every step."""

from pathlib import Path
from typing import Any

from postdate.client import admin
from tests.support.carrying import BEGIN, World
from tests.support.helpers import HOUR_MS, MINUTE_MS, TOPIC


def told(world: World, **wish: Any) -> dict[str, Any]:
    found = admin.pending(world.served.server.broker_address, **wish)
    assert found["unread"] == ""
    assert (
        found["total"] == found["near"] + found["far"] + found["table"] == sum(row["count"] for row in found["times"])
    )
    assert found["bytes"] == sum(row["bytes"] for row in found["times"]) == sum(row["bytes"] for row in found["topics"])
    return found


def places(world: World) -> tuple[int, int, int]:
    found = told(world)
    return found["near"], found["far"], found["table"]


def test_the_sum_is_what_waits_wherever_it_lies(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        assert places(world) == (0, 0, 0)
        dues = [BEGIN + 5 * MINUTE_MS, BEGIN + 5 * MINUTE_MS, BEGIN + HOUR_MS, BEGIN + 3 * HOUR_MS]
        world.send("first", dues)
        whole = told(world)
        assert places(world) == (0, 4, 0)
        world.batch()
        assert places(world) == (0, 0, 4)
        assert told(world)["bytes"] == whole["bytes"]
        assert told(world)["times"] == whole["times"], "a row of the table counts as it did in the log"
        world.send("second", [BEGIN + 2 * HOUR_MS])
        assert places(world) == (0, 1, 4)
        world.cancel("first-u2", dues[2], "unique")  # the message is in the table, its cancel in the log
        assert places(world) == (0, 1, 3)
        world.batch()  # now both are in the table
        assert places(world) == (0, 0, 4)
        world.cancel("second-k0", BEGIN + 2 * HOUR_MS, "key")
        assert places(world) == (0, 0, 3)
        world.pass_minutes(4)
        assert places(world) == (2, 0, 1), "two are promoted"
        assert told(world, unit="hour")["times"][-1]["count"] == 1
        address = world.served.server.broker_address
        bars = admin.forecast(address, TOPIC, "minute", 60)["bars"]
        assert [(bar["rows"], bar["busiest_rows"]) for bar in bars if bar["rows"]] == [(2, 2)]
        assert [bar["rows"] for bar in admin.forecast(address, "", "hour", 4)["bars"]] == [2, 0, 0, 1]
        world.served.call(lambda: world.broker.delete_topic(TOPIC, world.clock.now_ms()))
        assert places(world) == (0, 0, 0), "nobody can get them any more"
    finally:
        world.close()
