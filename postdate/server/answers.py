"""How errors become answers (RocketMQ's codes and a sentence), and how durable writes are answered."""

from collections.abc import Callable
from typing import Any

from postdate import errors
from postdate.broker.writing import Ticket
from postdate.server.connection import Connection
from postdate.wire import codes
from postdate.wire.frame import Command, reply

# What every answer to a send carries.
REGION_FIELDS = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}

# The first row whose class fits counts.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.IllegalMessage, codes.MESSAGE_ILLEGAL),
    (errors.TopicNotFound, codes.TOPIC_NOT_EXIST),
    (errors.GroupNotFound, codes.SUBSCRIPTION_GROUP_NOT_EXIST),
    (errors.SubscriptionMissing, codes.SUBSCRIPTION_NOT_EXIST),
    (errors.NoPermission, codes.NO_PERMISSION),
    (errors.PopsFull, codes.POLLING_FULL),
    (errors.FlowControl, codes.SYSTEM_BUSY),
    (errors.TableUnread, codes.SERVICE_NOT_AVAILABLE),
    (errors.DiskFull, codes.SERVICE_NOT_AVAILABLE),
    (errors.NotWritten, codes.SERVICE_NOT_AVAILABLE),
    (errors.LogFailed, codes.SERVICE_NOT_AVAILABLE),
    (errors.Refused, codes.ILLEGAL_OPERATION),
    (errors.ProtocolError, codes.INVALID_PARAMETER),
    (errors.UsageError, codes.INVALID_PARAMETER),
)


def code_of(error: Exception) -> int:
    """Returns the code of the answer to a request that failed."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), codes.SYSTEM_ERROR)


def refusal(command: Command, error: Exception) -> bytes:
    """Returns the answer to a request that failed."""
    return reply(command, code_of(error), remark=str(error))


def when_settled(
    connection: Connection, command: Command, answer: Callable[[Any], bytes] | None = None
) -> Callable[[Ticket], None]:
    """Returns a callback that answers a request by its ticket's answer (by success alone without `answer`), or refuses
    it by its ticket's error.
    """
    asked_by = command.without_content()

    def settle(ticket: Ticket) -> None:
        if asked_by.is_oneway:
            return
        if ticket.error is not None:
            connection.write(refusal(asked_by, ticket.error))
        else:
            connection.write(answer(ticket.answer) if answer else reply(asked_by, codes.SUCCESS))

    return settle
