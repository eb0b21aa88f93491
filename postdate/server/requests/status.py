"""What the broker reports about itself to operators: figures, rates and settings; and cleaning at their word.

The figures that RocketMQ's tools look for have its names. Ours follow, with names of our own.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from postdate import __version__
from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.config import DAY_MS, LIVE, rocketmq_settings
from postdate.errors import DiskFull, UsageError
from postdate.server.address import Address
from postdate.server.connection import Connection
from postdate.server.masking import mask, mask_settings
from postdate.server.pulse import Pulse
from postdate.server.requests.pipeline import Pipelines
from postdate.server.sessions.members import Conflict
from postdate.server.sessions.meter import Came, Meter, Span, Went, Whole
from postdate.wire import codes, reports
from postdate.wire.frame import Command, reply
from postdate.wire.requests import Request

_NONE = "0"  # for queues that RocketMQ has and we have not
_REPORTS_SHOWN = 20
_WARNINGS_SHOWN = 50
_LATE_MS = 100  # less than this is a disk that syncs
_LATE_BESIDE_MS = 5_000  # bulk looks once a second, and finds what an import brings too late
_HEARD_MS = 10_000  # a pipeline between two batches looks at the broker twice a second
_PIPELINE_FIGURES = ("taken", "backlog", "horizon", "epoch", "rescued", "bulk_promoted")
# What RocketMQ's tools look for in settings, and what is the same for every broker of ours.
_ALWAYS_SO = {"brokerId": "0", "brokerRole": "ASYNC_MASTER", "slaveReadEnable": "false", "traceTopicEnable": "false"}
_SPANS = {"statsMinute": Span.MINUTE, "statsHour": Span.HOUR, "statsDay": Span.DAY}


class Days:
    """Totals at the start of this day and of the one before it, by the calendar of UTC."""

    def __init__(self, now_ms: int, totals: tuple[int, int]) -> None:
        self._day = now_ms // DAY_MS
        self.this_morning = self.yesterday_morning = totals

    def update(self, now_ms: int, totals: tuple[int, int]) -> None:
        day = now_ms // DAY_MS
        if day > self._day:
            self.yesterday_morning = self.this_morning if day == self._day + 1 else totals
            self._day, self.this_morning = day, totals


class Late(NamedTuple):
    """Something that is late: what, since when, by how much at most, why, and what to do."""

    what: str
    since_ms: int
    late_ms: int
    why: str
    to_do: str


class Status:
    """Answers what operators ask about the broker as a whole. `counts` gives figures of the server itself, by name."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        address: Address,
        pulse: Pulse,
        meter: Meter,
        counts: Callable[[], Mapping[str, int]],
        pipelines: Pipelines,
        promotions: Callable[[], dict[str, Any]],
        conflicts: Callable[[], list[Conflict]],
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._address = address
        self._pulse = pulse
        self._meter = meter
        self._counts = counts
        self._pipelines = pipelines
        self._promotions = promotions
        self._conflicts = conflicts
        self.parts: Mapping[str, str] = {}  # by name of a child process: its state, in a sentence
        self._began_ms = clock.now_ms()
        self._days = Days(self._began_ms, self._totals())

    def tick(self) -> None:
        """Updates rates and totals. Called from time to time, and before an answer."""
        self._meter.tick(self._clock.elapsed_ns())
        self._days.update(self._clock.now_ms(), self._totals())

    def _totals(self) -> tuple[int, int]:
        """Returns how many messages came in and went out since the start."""
        return self._broker.accepted_count, self._meter.pulled_total

    # -- figures ------------------------------------------------------------------------------------------------

    def get_figures(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        self.tick()
        table = mask(self._known_to_tools() | self._own_figures(), connection.host)
        return reply(command, codes.SUCCESS, body=orjson.dumps({"table": table}))

    def _known_to_tools(self) -> dict[str, str]:
        log, (total, free) = self._broker.log, self._broker.disk_space()
        days, (came, went) = self._days, self._totals()
        minutes, seconds = divmod((self._clock.now_ms() - self._began_ms) // 1_000, 60)
        hours, minutes = divmod(minutes, 60)
        table = {
            "brokerVersionDesc": f"postdate {__version__}",
            "brokerVersion": str(codes.PROTOCOL_VERSION),
            "brokerActive": "true",
            "bootTimestamp": str(self._began_ms),
            "runtime": f"{hours // 24} days, {hours % 24} hours, {minutes} minutes, {seconds} seconds",
            "commitLogMinOffset": str(log.start),
            "commitLogMaxOffset": str(log.end),
            "commitLogDiskRatio": f"{1 - free / total:.4f}" if total else _NONE,
            "putTps": self._rates(Whole.ACCEPTED),
            "getTransferredTps": self._rates(Whole.PULLED),
            "getTransferedTps": self._rates(Whole.PULLED),  # as tools before 5.0 spell it
            "putMessageTimesTotal": str(came),
            "msgPutTotalTodayNow": str(came),
            "msgPutTotalTodayMorning": str(days.this_morning[0]),
            "msgPutTotalYesterdayMorning": str(days.yesterday_morning[0]),
            "msgGetTotalTodayNow": str(went),
            "msgGetTotalTodayMorning": str(days.this_morning[1]),
            "msgGetTotalYesterdayMorning": str(days.yesterday_morning[1]),
            "pageCacheLockTimeMills": _NONE,
            **{f"{kind}ThreadPoolQueueSize": _NONE for kind in ("send", "pull", "ack")},
            **{f"{kind}ThreadPoolQueueHeadWaitTimeMills": _NONE for kind in ("send", "pull", "ack")},
        }
        earliest_ms = log.begins_at_ms
        if earliest_ms is not None:
            table["earliestMessageTimeStamp"] = str(earliest_ms)
        # RocketMQ's timer. An accepted message is in the wheel at once: none is behind.
        return table | {
            "timerReadBehind": str(self._late_ms() // 1_000),
            "timerOffsetBehind": _NONE,
            "timerCongestNum": str(sum(self._broker.view.waiting_counts())),
            "timerEnqueueTps": self._rates(Whole.TIMED).split(" ")[0],
            "timerDequeueTps": self._rates(Whole.FIRED).split(" ")[0],
        }

    def _rates(self, key: Whole) -> str:
        """Returns messages per second over the last minute, hour and day."""
        now_ns = self._clock.elapsed_ns()
        return " ".join(f"{max(0.0, self._meter.rate(key, span, now_ns).per_second):.2f}" for span in Span)

    def _late_ms(self) -> int:
        """Returns how late the earliest waiting message is: 0, unless the disk is full or fails."""
        due_at_ms = self._broker.view.next_due_at_ms
        return 0 if due_at_ms == NEVER else max(0, self._clock.now_ms() - due_at_ms)

    def _own_figures(self) -> dict[str, str]:
        view, pipeline = self._broker.view, self._of_far()
        near, far = view.waiting_counts()
        figures: dict[str, Any] = {
            "postdate_waiting_near": near,
            "postdate_waiting_far": far,
            "postdate_late_ms": self._late_ms(),
            "postdate_timed_total": self._broker.timed_count,
            "postdate_fired_per_second": self._rates(Whole.FIRED),
            "postdate_tombstones": view.tombstone_count,
            **{f"postdate_pipeline_{name}": pipeline[name] for name in _PIPELINE_FIGURES},
            "postdate_pipeline_serving": str(pipeline["is_served"]).lower(),
            "postdate_topics": len(view.topic_names()),
            "postdate_groups": view.group_count,
            **{f"postdate_{name}": count for name, count in self._counts().items()},
            "postdate_log_problem": self._broker.log.failure or self._broker.fire_error or "none",
        }
        return {name: str(value) for name, value in figures.items()}

    def get_replicas(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        """Answers how far replicas are, as a broker of RocketMQ without any does."""
        return reply(command, codes.SUCCESS, body=reports.encode_no_replicas(self._broker.log.end))

    # -- the whole at a glance ----------------------------------------------------------------------------------

    def get_overview(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        overview = {
            "late": [each._asdict() for each in self.list_late()],
            "warnings": [each._asdict() for each in self._conflicts()[:_WARNINGS_SHOWN]],
            "broker": self._of_broker(),
            "far": self._of_far(),
            "table": self._broker.view.far.table,
            "pipeline": self._pipelines.heard._asdict(),
            "reports": self._pipelines.last_reports(_REPORTS_SHOWN),
            "stand_in": self._pipelines.stand_in,
            "parts": self._of_parts(),
        }
        return reply(command, codes.SUCCESS, body=orjson.dumps(mask(overview, connection.host)))

    def _of_broker(self) -> dict[str, Any]:
        broker = self._broker
        (near, far), (total, free) = broker.view.waiting_counts(), broker.disk_space()
        return {
            "version": __version__,
            "data": str(Path(broker.settings.data).resolve()),
            "flush": broker.settings.flush,
            "now_ms": self._clock.now_ms(),
            "waiting_near": near,
            "waiting_far": far,
            "late_ms": self._late_ms(),
            "tombstones": broker.view.tombstone_count,
            "disk_bytes": total,
            "disk_free_bytes": free,
            "log_bytes": sum(min(stop, broker.log.end) - start for start, stop in broker.log.ranges()),
            "log_problem": str(broker.log.failure or broker.fire_error or ""),
        }

    def _of_far(self) -> dict[str, Any]:
        """Returns the figures of the far queue and of the pipeline that takes from it."""
        far = self._broker.view.far
        return {
            "taken": far.taken,
            "length": far.length,
            "backlog": far.length - far.taken,
            "horizon": far.horizon_at_ms,
            "epoch": far.epoch,
            "is_served": self._broker.rescuer.is_served(self._clock.now_ms()),
            "rescued": self._broker.rescuer.rescued_count,
            "rows_in": far.rows_in,
            "rows_out": far.rows_out,
            "beside_rows": self._broker.view.rows_beside(),
            **self._promotions(),
        }

    def _of_parts(self) -> dict[str, str]:
        """Returns the state of each process beside the broker. A pipeline may run elsewhere."""
        parts, heard_at_ms = dict(self.parts), self._pipelines.heard.at_ms
        if heard_at_ms and parts.get("pipeline", "").startswith("none here"):
            ago_ms = self._clock.now_ms() - heard_at_ms
            parts["pipeline"] = f"none here; one elsewhere was heard of {ago_ms // 1_000} s ago"
        return parts

    # -- what is late -------------------------------------------------------------------------------------------

    def list_late(self) -> list[Late]:
        """Lists what is late, and why, as far as the broker knows; empty where all is well."""
        found = (
            self._find_late_fires(), self._find_late_rescues(), self._find_late_promotions(), self._find_late_files()
        )  # fmt: skip
        return [each for each in found if each is not None]

    def _find_late_fires(self) -> Late | None:
        broker, late_ms = self._broker, self._late_ms()
        problem = broker.log.failure or broker.fire_error
        if late_ms < _LATE_MS and not problem:
            return None
        to_do = "look at the disk: a sync takes this long"
        if problem:
            is_full = isinstance(problem, DiskFull)
            to_do = f"make room on the disk of {broker.settings.data}" if is_full else "restart it when its disk works"
        what, why = "messages that are due and in memory", str(problem or "the disk is slow, or the machine is busy")
        return Late(what, self._clock.now_ms() - late_ms, late_ms, why, to_do)

    def _find_late_rescues(self) -> Late | None:
        """The wheel is full: what should come from the log into it finds no room."""
        now_ms, limit = self._clock.now_ms(), self._broker.settings.wheel_entries_max
        due_at_ms = self._broker.rescuer.blocked_from_ms(now_ms)
        if due_at_ms > now_ms:
            return None
        why = f"wheel_entries_max: {limit} messages are due soon and in memory, the limit"
        return Late("far messages in the log", due_at_ms, now_ms - due_at_ms, why, "raise wheel_entries_max")

    def _find_late_promotions(self) -> Late | None:
        """Nobody promotes: what only the table has falls due there. What the log has is rescued, and on time."""
        far, now_ms = self._of_far(), self._clock.now_ms()
        if not far["bulk_problem"] and (not self._broker.view.far.in_table or far["is_served"]):
            return None
        since_ms = far["bulk_problem_since_ms"] or far["horizon"] - self._broker.rescuer.rescue_lead_ms + 1
        what = "messages that only the table has, as far as they are due"
        return Late(what, since_ms, max(0, now_ms - far["horizon"]), *self._explain_promotions(far, now_ms))

    def _find_late_files(self) -> Late | None:
        """Nobody brings what imports and postponements have written beside the table."""
        due_at_ms, now_ms = self._broker.view.first_due_beside(), self._clock.now_ms()
        if now_ms - due_at_ms < _LATE_BESIDE_MS:
            return None
        what = "messages of imports and postponements that no batch has taken in, as far as they are due"
        return Late(what, due_at_ms, now_ms - due_at_ms, *self._explain_promotions(self._of_far(), now_ms))

    def _explain_promotions(self, far: Mapping[str, Any], now_ms: int) -> tuple[str, str]:
        """Returns why nobody promotes, neither the pipeline nor bulk, and what to do."""
        if far["bulk_problem"]:
            to_do = "do as it says, or repair the table: docs/pipeline.md, A damaged table"
            return str(far["bulk_problem"]), to_do
        why, to_do = self._explain_pipeline(now_ms)
        if not far["bulk_attached"]:
            why += f", and bulk {self.parts.get('bulk', 'is not there either')}"
        return why, to_do

    def _explain_pipeline(self, now_ms: int) -> tuple[str, str]:
        heard, part = self._pipelines.heard, self.parts.get("pipeline", "")
        if heard.note:
            return f"the pipeline {heard.note}", "give it cores, or end what uses them"
        if now_ms - heard.at_ms <= _HEARD_MS:
            return "the pipeline works, and is behind", "look at its last batches, below"
        if part and not part.startswith(("none here", "runs on")):
            return f"the pipeline {part}", "do as it says, or look at the broker's log"
        since = f"for {(now_ms - heard.at_ms) // 1_000} s" if heard.at_ms else "since the broker was started"
        to_do = "look at its log" if part.startswith("runs on") else "start one: postdate pipeline --addr HOST:PORT"
        return f"no pipeline was heard of {since}", to_do

    # -- rates --------------------------------------------------------------------------------------------------

    def get_rates(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers the rates of a topic (TOPIC_PUT_NUMS), or of a "topic@group" (GROUP_GET_NUMS)."""
        self.tick()
        kind, name, now_ns = asked["statsName"], asked["statsKey"], self._clock.elapsed_ns()
        if kind not in ("TOPIC_PUT_NUMS", "GROUP_GET_NUMS"):
            raise UsageError(f"there are no statistics {kind[:64]!r}, expected TOPIC_PUT_NUMS or GROUP_GET_NUMS")
        key = Came(name) if kind == "TOPIC_PUT_NUMS" else Went(*name.partition("@")[::2])
        body = {}
        for field, span in _SPANS.items():
            rate = self._meter.rate(key, span, now_ns)
            body[field] = {"avgpt": 0.0, "sum": rate.sum, "tps": rate.per_second}
        return reply(command, codes.SUCCESS, body=orjson.dumps(body))

    # -- settings -----------------------------------------------------------------------------------------------

    def get_settings(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        """Answers all settings as text, also by RocketMQ's names, and which of them may change while the broker runs.
        Places are masked.
        """
        values = mask_settings(self._broker.settings, connection.host)
        values |= rocketmq_settings(values) | _ALWAYS_SO | self._places(connection, command)
        texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
        body = reports.encode_properties_text(texts | {"live_settings": " ".join(sorted(LIVE))})
        return reply(command, codes.SUCCESS, {"version": f"postdate {__version__}"}, body=body)

    def _places(self, connection: Connection, command: Command) -> dict[str, str]:
        """Returns where this client finds the broker and its name server: of the one that it asks, the port."""
        host, _, port = connection.broker_address.rpartition(":")
        route_port = str(self._address.route_port)
        listen_port = route_port if command.code == Request.GET_NAMESRV_CONFIG else port
        return {"brokerIP1": host, "listenPort": listen_port, "namesrvAddr": f"{host}:{route_port}"}

    def change_settings(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        """Changes all of the settings, or none where one is refused."""
        self._broker.change_settings(reports.decode_properties_text(command.body))
        return reply(command, codes.SUCCESS)

    # -- cleaning -----------------------------------------------------------------------------------------------

    def remove_expired(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        """Removes at once what the next retention would: files whose time is over. Answers how many.

        That is all there is to clean: what a deleted topic has left goes in the same way, and like RocketMQ's, our
        broker removes no topic because nobody uses it.
        """
        return reply(command, codes.SUCCESS, {"removed": self._pulse.remove_old_files()})
