"""Statuses of calls, by answers of the older protocol and by errors."""

import pytest

from postdate import errors
from postdate.server.grpc.statuses import OK_STATUS, common_status, make_status, status_of, status_of_error
from postdate.wire import codes, messaging
from postdate.wire.frame import Command
from postdate.wire.messaging import CallError


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (codes.SUCCESS, messaging.OK),
        (codes.SYSTEM_BUSY, messaging.TOO_MANY_REQUESTS),
        (codes.POLLING_FULL, messaging.TOO_MANY_REQUESTS),
        (codes.NO_PERMISSION, messaging.FORBIDDEN),
        (codes.TOPIC_NOT_EXIST, messaging.TOPIC_NOT_FOUND),
        (codes.SUBSCRIPTION_GROUP_NOT_EXIST, messaging.GROUP_NOT_FOUND),
        (codes.NO_MESSAGE, messaging.INVALID_HANDLE),
        (codes.REQUEST_CODE_NOT_SUPPORTED, messaging.NOT_IMPLEMENTED),
        (codes.SYSTEM_ERROR, messaging.INTERNAL_ERROR),
        (codes.SERVICE_NOT_AVAILABLE, messaging.INTERNAL_ERROR),
        (999, messaging.INTERNAL_ERROR),
    ],
)
def test_an_answer_has_a_status(code: int, status: int) -> None:
    found = status_of(Command(code, {}, remark="why"))
    assert found.code == status
    assert found.message == ("OK" if code == codes.SUCCESS else "why")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CallError(messaging.ILLEGAL_TAG, "why"), messaging.ILLEGAL_TAG),
        (errors.IllegalMessage("why"), messaging.BAD_REQUEST),
        (errors.UsageError("why"), messaging.BAD_REQUEST),
        (errors.NoPermission("why"), messaging.FORBIDDEN),
        (errors.TopicNotFound("why"), messaging.TOPIC_NOT_FOUND),
        (errors.GroupNotFound("why"), messaging.GROUP_NOT_FOUND),
        (errors.FlowControl("why"), messaging.TOO_MANY_REQUESTS),
        (errors.PopsFull("why"), messaging.TOO_MANY_REQUESTS),
        (errors.DiskFull("why"), messaging.INTERNAL_ERROR),
        (errors.LogFailed("why"), messaging.INTERNAL_ERROR),
        (OSError("why"), messaging.INTERNAL_ERROR),
    ],
)
def test_an_error_has_the_status_of_the_answer_that_it_would_be(error: Exception, status: int) -> None:
    found = status_of_error(error)
    assert (found.code, found.message) == (status, "why")


def test_a_call_has_the_status_of_its_parts_or_says_that_they_differ() -> None:
    gone, other = make_status(messaging.INVALID_HANDLE, "a"), make_status(messaging.INVALID_HANDLE, "b")
    assert common_status([OK_STATUS, OK_STATUS]).code == messaging.OK
    assert common_status([gone, other]).code == messaging.INVALID_HANDLE
    assert common_status([OK_STATUS, gone]).code == messaging.MULTIPLE_RESULTS
