"""What can go wrong between a client and its broker, beside what `postdate.errors` names already."""

import os
import re
import ssl
from typing import TYPE_CHECKING

from postdate.errors import (
    FlowControl,
    GroupNotFound,
    IllegalMessage,
    NoPermission,
    PostdateError,
    Refused,
    TopicNotFound,
)
from postdate.tls import reason_of
from postdate.wire import codes

if TYPE_CHECKING:  # frames need more than the standard library, which is all that executors have
    from postdate.wire.frame import Command


_UNKNOWN_AUTHORITY, _OTHER_HOST = {18, 19, 20, 21}, {62, 64}  # X509_V_ERR_... of OpenSSL


class Unavailable(PostdateError):
    """The broker's fault: it runs, but does not take this for now (RocketMQ code 14)."""


class TimedOut(PostdateError, TimeoutError):
    """Nobody's fault yet: no answer came in time. What was asked for may have been done."""


class Unreachable(PostdateError, ConnectionError):
    """The operator's fault, mostly: no broker answers at that address."""


class Disconnected(Unreachable):
    """The connection was lost before the answer came. What was asked for may have been done."""


class Untrusted(PostdateError, ConnectionError):
    """The operator's fault, or an attack: the broker's certificate is not to be trusted, and no later try will help."""


class BrokerError(PostdateError):
    """The broker refused with a code that has no name of its own here."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(f"{sentence} (code {code})")
        self.code, self.sentence = code, sentence


_BY_CODE: dict[int, type[PostdateError]] = {
    codes.SYSTEM_BUSY: FlowControl,
    codes.MESSAGE_ILLEGAL: IllegalMessage,
    codes.SERVICE_NOT_AVAILABLE: Unavailable,
    codes.NO_PERMISSION: NoPermission,
    codes.TOPIC_NOT_EXIST: TopicNotFound,
    codes.SUBSCRIPTION_GROUP_NOT_EXIST: GroupNotFound,
    codes.ILLEGAL_OPERATION: Refused,
}


def refusal_of(code: int, remark: str | None) -> PostdateError:
    """The error that the code of an answer means, with the broker's own sentence."""
    sentence = remark or "the broker gave no reason"
    named = _BY_CODE.get(code)
    return BrokerError(code, sentence) if named is None else named(sentence)


def refusal(answer: "Command") -> PostdateError:
    return refusal_of(answer.code, answer.remark)


def expect_success(answer: "Command") -> "Command":
    """The answer, if it is one of success. Raises what it means otherwise."""
    if answer.code != codes.SUCCESS:
        raise refusal(answer)
    return answer


def no_broker_at(address: object, error: OSError | UnicodeError, *, is_tls: bool = False) -> Unreachable | Untrusted:
    """The error of a connection that was not made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(f"the certificate of the broker at {address} is not to be trusted: {_why_untrusted(error)}")
    if isinstance(error, ssl.SSLError):
        return Unreachable(f"no TLS with {address}: {reason_of(error)}; does that port speak TLS?")
    if is_tls and isinstance(error, ConnectionResetError | ConnectionAbortedError):
        return Unreachable(
            f"no TLS with {address}: it has ended the handshake; does that port speak TLS, and does it want a "
            "certificate of the client?"
        )
    return Unreachable(f"no broker at {address}: {in_words(error)}; is it running? start it with: postdate up")


def _why_untrusted(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _UNKNOWN_AUTHORITY:
        return f"no authority that we trust has signed it ({reason_of(error)}); ca_file names the file of another one"
    if error.verify_code in _OTHER_HOST:
        return f"it is for another host ({reason_of(error)}); connect by a name that stands in it"
    return reason_of(error)


def in_words(error: OSError | UnicodeError) -> str:
    """Why a connection was not made, without the numbers and tuples of the event loop's own sentence.

    Where a name has several addresses, the loop puts the sentences of all in one; they mostly say the same.
    """
    numbers = [int(number) for number in re.findall(r"\[Errno (-?[0-9]+)\]", str(error))]
    if not numbers or min(numbers) <= 0:  # no number of the system's: a name that is not known, or cannot be one
        return _lower(getattr(error, "strerror", None) or str(error))
    return ", ".join(dict.fromkeys([_lower(os.strerror(number)) for number in numbers]))


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


# What passes when the broker is itself again. Everything else that it answers is for the caller to mend.
PASSING = (Unreachable, TimedOut, Unavailable, FlowControl)

PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 5.0  # long enough to spare a broker that starts, short enough to notice it soon


class Pause:
    """How long to wait before the next try: doubles with every failure, starts again after a success."""

    def __init__(self, seconds_max: float = PAUSE_SECONDS_MAX) -> None:
        self._seconds, self._seconds_max = 0.0, seconds_max

    @property
    def is_fresh(self) -> bool:
        """Whether the last try succeeded."""
        return self._seconds == 0

    def next(self) -> float:
        self._seconds = min(max(self._seconds * 2, PAUSE_SECONDS_MIN), self._seconds_max)
        return self._seconds

    def reset(self) -> None:
        self._seconds = 0.0
