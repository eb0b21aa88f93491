"""Transactions: ends by producers and by operators, checks of those that were left open, and lists of them.

A check is a oneway request to one producer of the half; its answer is an end like any other. Who can be asked is found
by sessions/checkers.py. Halves come in as sends (send.py).
"""

import base64
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.broker.transactions import OpenHalf
from postdate.clock import Clock
from postdate.errors import DiskFull, LogFailed, UsageError
from postdate.message import (
    PROPERTIES_BYTES_MAX,
    PROPERTY_CHECK_TIMES,
    Ended,
    decode_properties,
    encode_properties,
)
from postdate.server.answers import when_settled
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.sessions import Sessions
from postdate.server.sessions.checkers import Ask
from postdate.server.sessions.members import Sender
from postdate.storage import record as records
from postdate.wire import codes
from postdate.wire.frame import Command, encode, reply
from postdate.wire.ids import encode_transaction_id, message_id, parse_transaction_id
from postdate.wire.requests import ClientRequest
from postdate.wire.rights import PUB, ask_topic

logger = logging.getLogger("postdate.server")

TICK_MS = 1_000  # how often the server looks whom to ask
_COMMIT, _ROLL_BACK, _UNDECIDED = codes.SYS_COMMIT, codes.SYS_ROLLBACK, 0  # what an end says
_LISTED_MAX = 100
_BODY_BYTES_SHOWN = 64 << 10
_WANTED = {True: (Ended.COMMITTED, Ended.ALREADY_COMMITTED), False: (Ended.ROLLED_BACK, Ended.ALREADY_ROLLED_BACK)}


class Transactions:
    """Answers END_TRANSACTION and what operators ask; sends CHECK_TRANSACTION_STATE."""

    def __init__(self, broker: Broker, clock: Clock, pulse: Pulse, sessions: Sessions) -> None:
        self._broker, self._clock, self._pulse = broker, clock, pulse
        self._checkers, self._senders = sessions.checkers, sessions.senders
        self._checkers.add(self._find_producers)
        self._trouble = ""  # the one that was logged last

    # -- ends ---------------------------------------------------------------------------------------------------

    def end(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        """Ends a transaction as its producer says. A producer that does not know yet changes nothing."""
        decision, offset = asked["commitOrRollback"], asked["commitLogOffset"]
        if decision not in (_COMMIT, _ROLL_BACK, _UNDECIDED):
            raise UsageError(f"commitOrRollback is {decision}, expected {_COMMIT}, {_ROLL_BACK} or {_UNDECIDED}")
        found = self._broker.transactions.find_open(offset)
        topic = found.topic if found is not None else asked["topic"]
        if topic:
            connection.asker.require(ask_topic(topic, PUB))
        if decision == _UNDECIDED:
            return reply(command, codes.SUCCESS)
        self._end(
            connection, command, offset, is_commit=decision == _COMMIT, number=asked["tranStateTableOffset"],
            group=asked["producerGroup"],
        )  # fmt: skip
        return None

    def end_by_operator(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Ends a transaction as an operator says, also one that was given up."""
        offset, number = parse_transaction_id(asked["id"])
        self._end(connection, command, offset, is_commit=asked["commit"], number=number)

    def _end(self, connection: Connection, command: Command, offset: int, *, is_commit: bool, **half: Any) -> None:
        ticket = self._broker.transactions.end(offset, self._clock.now_ms(), is_commit=is_commit, **half)
        request = command.without_content()
        self._pulse.expect(
            connection, ticket, when_settled(connection, request, partial(_answer_end, request, is_commit))
        )

    # -- checks -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Asks producers about the halves whose turn it is. Called once a second."""
        calls, now_ms = self._broker.transactions, self._clock.now_ms()
        if calls.next_check_at_ms > now_ms or self._broker.log.failure is not None:
            return
        try:
            due = calls.take_due_checks(now_ms)
            asked = [half for half in due if self._checkers.ask(half)]
            offsets = {half.half.offset for half in asked}
            calls.postpone([half for half in due if half.half.offset not in offsets], now_ms)
            calls.note_checked(asked, now_ms)
            self._trouble = ""
        except (DiskFull, LogFailed) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.error("checks of transactions cannot be counted, trying again: %s", error)
        self._pulse.nudge()

    def _find_producers(self, half: OpenHalf) -> list[Ask]:
        """Returns the producers of a half that speak remoting and may send to its topic."""
        senders = self._senders.of(half.group)
        return [
            partial(self._ask, sender)
            for sender in senders
            if sender.link.takes_questions and sender.asker.may_topic(half.topic, PUB)
        ]

    def _ask(self, sender: Sender[Connection], half: OpenHalf) -> bool:
        connection = sender.link
        if connection.is_paused:
            return False
        fields = {
            "topic": half.topic, "commitLogOffset": half.half.offset, "tranStateTableOffset": half.half.number,
            "msgId": half.unique_key, "transactionId": half.unique_key,
            "offsetMsgId": message_id(connection.broker_host, half.half.offset),
            "bname": self._broker.settings.broker_name,
        }  # fmt: skip
        body = checked_record(half, connection)
        connection.write(encode(Command(ClientRequest.CHECK_TRANSACTION_STATE, fields, body, flag=codes.FLAG_ONEWAY)))
        return True

    # -- for operators ------------------------------------------------------------------------------------------

    def list_open(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers the transactions that are open, after a place in the log; or one of them, with its body."""
        calls, body = self._broker.transactions, dict[str, Any]()
        if asked["id"]:
            offset, number = parse_transaction_id(asked["id"])
            found = calls.find_open(offset)
            is_known = found is not None and found.half.number == number
            halves = [found] if found is not None and is_known else []
            listed = [_fields_of(half) | _content_of(half) for half in halves]
            body["outcome"] = "" if halves else calls.how_ended(offset).value
        else:
            limit = max(1, min(asked["limit"], _LISTED_MAX))
            halves = calls.list_open(asked["after"], limit, asked["topic"])
            listed = [_fields_of(half) for half in halves]
            body["next"] = halves[-1].half.offset if len(halves) == limit else -1
        body |= {"transactions": listed, "open": calls.open_count, "givenUp": calls.given_up_count}
        return reply(command, codes.SUCCESS, body=orjson.dumps(body))


def _answer_end(request: Command, is_commit: bool, ended: Ended) -> bytes:
    fields = {"outcome": ended.value}
    if ended in _WANTED[is_commit]:
        return reply(request, codes.SUCCESS, fields)
    said = "is not known, or not any more" if ended is Ended.UNKNOWN else f"is {ended.value.replace('_', ' ')}"
    return reply(request, codes.SYSTEM_ERROR, fields, remark=f"the transaction {said}: nothing has changed")


def checked_record(half: OpenHalf, connection: Connection) -> bytes:
    """Returns the record of a half as its producer reads it, with the number of this check."""
    times = encode_properties({PROPERTY_CHECK_TIMES: str(half.half.check_count + 1)})
    body = bytearray(records.extended(half.record, times, PROPERTIES_BYTES_MAX))
    records.deliver(body, [(0, half.half.number, half.half.offset, half.half.stored_at_ms)], connection.broker_host)
    return bytes(body)


def _fields_of(half: OpenHalf) -> dict[str, Any]:
    known = half.half
    return {
        "id": encode_transaction_id(known.offset, known.number),
        "topic": half.topic,
        "queueId": half.queue_id,
        "group": half.group,
        "messageId": half.unique_key,
        "keys": half.keys,
        "storedAt": known.stored_at_ms,
        "checks": known.check_count,
        "nextCheck": 0 if known.check_at_ms == NEVER else known.check_at_ms,
        "givenUp": known.given_up_at_ms,
        "bytes": known.size,
    }


def _content_of(half: OpenHalf) -> dict[str, Any]:
    record = records.decode(half.record)
    return {
        "properties": decode_properties(record.properties),
        "bodyBytes": len(record.body),
        "body": base64.b64encode(record.body[:_BODY_BYTES_SHOWN]).decode(),
    }
