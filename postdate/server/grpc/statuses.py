"""How answers of the older protocol and errors become statuses of calls."""

from typing import Any

from postdate.server.answers import code_of
from postdate.wire import codes, messaging
from postdate.wire.frame import Command
from postdate.wire.messaging import MESSAGES, CallError

_STATUSES = {
    codes.SUCCESS: messaging.OK,
    codes.SYSTEM_BUSY: messaging.TOO_MANY_REQUESTS,
    codes.POLLING_FULL: messaging.TOO_MANY_REQUESTS,
    codes.REQUEST_CODE_NOT_SUPPORTED: messaging.NOT_IMPLEMENTED,
    codes.MESSAGE_ILLEGAL: messaging.BAD_REQUEST,
    codes.INVALID_PARAMETER: messaging.BAD_REQUEST,
    codes.ILLEGAL_OPERATION: messaging.BAD_REQUEST,
    codes.NO_PERMISSION: messaging.FORBIDDEN,
    codes.TOPIC_NOT_EXIST: messaging.TOPIC_NOT_FOUND,
    codes.SUBSCRIPTION_GROUP_NOT_EXIST: messaging.GROUP_NOT_FOUND,
    codes.NO_MESSAGE: messaging.INVALID_HANDLE,
}


def make_status(code: int, text: str = "OK") -> Any:
    return MESSAGES["Status"](code=code, message=text)


OK_STATUS = make_status(messaging.OK)


def status_of(answer: Command) -> Any:
    """Returns the status that says what an answer of the older protocol says."""
    if answer.code == codes.SUCCESS:
        return OK_STATUS
    return make_status(_find_code(answer.code), answer.remark or "")


def status_of_error(error: Exception) -> Any:
    code = error.code if isinstance(error, CallError) else _find_code(code_of(error))
    return make_status(code, str(error))


def _find_code(code: int) -> int:
    return _STATUSES.get(code, messaging.INTERNAL_ERROR)


def common_status(statuses: list[Any]) -> Any:
    """Returns the status of a call whose parts have these: the one that all have, or that they differ."""
    if all(each.code == statuses[0].code for each in statuses):
        return statuses[0]
    return make_status(messaging.MULTIPLE_RESULTS, "see the status of each entry")
