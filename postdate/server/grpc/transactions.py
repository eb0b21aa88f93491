"""Transactions over gRPC: their ends, and the question what became of those that were left open.

The id that a producer has got names the place of its half in the log, so nothing about it need be remembered here. A
producer is asked on its telemetry stream; it answers with an end like any other, or not at all.
"""

from functools import partial
from typing import Any

from postdate.broker.transactions import OpenHalf
from postdate.client.received import decompress
from postdate.errors import ProtocolError
from postdate.message import check_topic
from postdate.server.dispatch import Dispatcher
from postdate.server.grpc.call import Call
from postdate.server.grpc.client import GrpcClient
from postdate.server.grpc.requests import CallRequests, name_of
from postdate.server.grpc.statuses import OK_STATUS, make_status, status_of
from postdate.server.requests.transactions import checked_record
from postdate.server.sessions.checkers import Ask
from postdate.storage.record import decode
from postdate.wire import codes, messaging
from postdate.wire.frame import Command
from postdate.wire.ids import encode_transaction_id, parse_transaction_id
from postdate.wire.messaging import CallError
from postdate.wire.requests import Request
from postdate.wire.rights import PUB
from postdate.wire.translation import make_message

_SAID = {messaging.COMMIT: codes.SYS_COMMIT, messaging.ROLLBACK: codes.SYS_ROLLBACK}


class TransactionEnds:
    """Answers EndTransaction, and asks producers."""

    def __init__(self, requests: CallRequests, dispatcher: Dispatcher) -> None:
        self._requests, self._dispatcher = requests, dispatcher
        dispatcher.sessions.checkers.add(self._find_producers)

    def end(self, call: Call, request: Any) -> None:
        """Ends a transaction as its producer says. One that does not know changes nothing."""
        topic = name_of(request.topic, check_topic, messaging.ILLEGAL_TOPIC)
        try:
            offset, number = parse_transaction_id(request.transaction_id)
        except ProtocolError as error:
            raise CallError(messaging.INVALID_TRANSACTION_ID, str(error)) from error
        fields = {
            "topic": topic, "producerGroup": topic, "commitLogOffset": offset, "tranStateTableOffset": number,
            "commitOrRollback": _SAID.get(request.resolution, 0), "msgId": request.message_id,
            "fromTransactionCheck": request.source == messaging.BY_CHECK,
        }  # fmt: skip

        def answer(reply: Command) -> None:
            if reply.fields.get("outcome"):  # it is known what became of it, and it is not what was asked for
                wrong = make_status(messaging.INVALID_TRANSACTION_ID, reply.remark or "")
                call.answer(status=OK_STATUS if reply.code == codes.SUCCESS else wrong)
            else:
                call.answer(status=status_of(reply))

        self._requests.ask(call, Request.END_TRANSACTION, fields, answer)

    def _find_producers(self, half: OpenHalf) -> list[Ask]:
        """Returns the clients that publish to the topic of a half and take commands at the moment."""
        senders = self._dispatcher.sessions.senders.of(half.group)
        return [
            partial(self._ask, sender.link)
            for sender in senders
            if isinstance(sender.link, GrpcClient) and sender.asker.may_topic(half.topic, PUB)
        ]

    def _ask(self, client: GrpcClient, half: OpenHalf) -> bool:
        telemetry: Call | None = client.telemetry
        if telemetry is None or telemetry.is_over or client.is_paused:
            return False
        message = make_message(decode(checked_record(half, client)), unfold=decompress)
        transaction_id = encode_transaction_id(half.half.offset, half.half.number)
        telemetry.send(
            status=OK_STATUS,
            recover_orphaned_transaction_command={"message": message, "transaction_id": transaction_id},
        )
        return True
