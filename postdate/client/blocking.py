"""The blocking client: the asyncio client on an event loop of its own, in a thread."""

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from inspect import isawaitable, iscoroutine
from math import inf
from typing import overload

from postdate.client.admin import Changed, FoundMessage
from postdate.client.asynchronous import TIMEOUT_SECONDS_DEFAULT, AsyncClient
from postdate.client.backlog import Delivery, Turn
from postdate.client.consumer import LEAVE_SECONDS, Consumer
from postdate.client.dead_letters import LIMIT_DEFAULT, DeadLetter
from postdate.client.keys import FIND_LIMIT_DEFAULT, CancelledMessage, MovedMessage, wish_of
from postdate.client.loop import LIFE_SIGN_SECONDS, Closed, LoopThread
from postdate.client.options import (
    BATCH_DEFAULT,
    PREFETCH_DEFAULT,
    From,
    Wanted,
    is_coroutine_function,
    wanted_by_listener,
)
from postdate.client.outgoing import Key, Outgoing, Receipt, Text
from postdate.client.received import ReceivedMessage
from postdate.client.resets import QueueReset, ResetTo
from postdate.client.signals import stop_on_signals
from postdate.clock import elapsed_ns
from postdate.errors import UsageError
from postdate.message import Cancelled
from postdate.spans import Delay, delay_ms

# It returns nothing, so that type checkers refuse a coroutine function: nobody would await what that returns.
Handler = Callable[[ReceivedMessage], None]


class _FarConsumer:
    """A consumer, which lives on the loop, as callers' threads reach it. When the client is closed, it has left."""

    def __init__(self, consumer: Consumer, client: AsyncClient, loop: LoopThread) -> None:
        self._consumer, self._client, self._loop = consumer, client, loop

    def next(self, done: Turn | None) -> Turn | None:
        """As `Consumer.next`."""
        self._consumer.callers.add(threading.get_ident())
        turn = self._consumer.next_within(0, done)
        if turn is not None:
            return turn
        idle_seconds = self._consumer.idle_seconds
        end_ns = inf if idle_seconds is None else elapsed_ns() + idle_seconds * 1e9
        while turn is None and not self._consumer.has_ended and self._loop.is_alive:
            seconds_left = (end_ns - elapsed_ns()) / 1e9
            if seconds_left <= 0:
                break
            turn = self._consumer.next_within(min(seconds_left, LIFE_SIGN_SECONDS))
        return turn

    def acknowledge(self, delivery: Delivery) -> None:
        self._loop.run(self._consumer.acknowledge(delivery))

    def retry(self, delivery: Delivery, delay: Delay | None) -> None:
        self._loop.run(self._consumer.retry(delivery, delay))

    def give_back(self, delivery: Delivery, error: Exception) -> bool:
        with suppress(Closed):
            return self._loop.run(self._consumer.give_back(delivery, error))
        return False

    def stop(self) -> None:
        async def stop() -> None:
            self._consumer.stop()

        with suppress(Closed):
            self._loop.run(stop())

    def leave(self, seconds: float = LEAVE_SECONDS, at_hand: Delivery | None = None) -> None:
        with suppress(Closed):
            if self._loop.is_ours:  # a loop over messages that was forgotten, and is cleared away there
                self._loop.start(self._client.leave(self._consumer, seconds, at_hand))
            else:
                self._loop.run(self._client.leave(self._consumer, seconds, at_hand))


class Client:
    """Talks to a broker; any number of threads may share one. Made by `postdate.connect`; close it, or use `with`.

    Connections are made when they are first needed, and made anew when they are lost. Whatever asks a broker takes at
    most about `timeout` seconds and may raise TimedOut, Unreachable (Disconnected if the connection was lost while it
    waited) and, with the broker's own sentence, FlowControl, Unavailable, NoPermission, TopicNotFound, IllegalMessage
    or BrokerError. Catch `PostdateError` to catch all of them. Ctrl-C ends every call.
    """

    def __init__(
        self, address: str | None = None, *, timeout: float = TIMEOUT_SECONDS_DEFAULT, access_key: str | None = None,
        secret_key: str | None = None, security_token: str | None = None, tls: bool | None = None,
        ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None,
    ) -> None:  # fmt: skip
        self._client = AsyncClient(
            address, timeout=timeout, access_key=access_key, secret_key=secret_key, security_token=security_token,
            tls=tls, ca_file=ca_file, cert_file=cert_file, key_file=key_file,
        )  # fmt: skip
        self._timeout = timeout
        self._is_closed = False
        self._loop = LoopThread()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves all groups at once, committing what is acknowledged, and drops the connections; takes at most about a
        second.

        May be repeated, and called from any thread. Loops over `consume` and calls of `listen` end when the message at
        hand is done with; that message comes again. `stop` ends them without repeating work.
        """
        self._is_closed = True
        if self._loop.is_forked:
            return  # the connections are the parent's
        try:
            with suppress(Closed):
                self._loop.run(self._client.close())
        finally:
            self._loop.stop()

    def stop(self, timeout: float | None = None) -> bool:
        """Ends all loops over `consume` and calls of `listen` in peace: they take no more messages, finish those at
        hand, acknowledge them and leave their groups. What finished does not come again; what was not begun comes to
        other members at once.

        Waits for that, at most `timeout` seconds, and returns whether all ended in time. Called by a handler or in the
        body of a loop it returns False at once, because that handler or body has to end first. The client still
        sends, and may consume and listen again.
        """
        try:
            return self._loop.run(self._client.stop_for(threading.get_ident(), timeout))
        except Closed:
            return True

    # -- sending

    def send(
        self, topic: str, body: bytes | str, *, delay: Delay | None = None, at: datetime | None = None,
        level: int | None = None, key: Key | None = None, tag: str | None = None,
        properties: Mapping[str, Text] | None = None, queue: int | None = None, once: Text | None = None,
    ) -> Receipt:  # fmt: skip
        """Sends one message; when this returns, the broker has stored it.

        At most one of these says when it may be received, by the broker's clock; without any, at once:
        `delay`, "30m", "1h30m", "500ms", a number of seconds or a timedelta; `at`, a datetime with a time zone;
        `level`, a delay level of RocketMQ, from 1 on.

        `key` is what to find the message by, or a list of several, without spaces; `tag` what consumers may filter by,
        `properties` anything else. Numbers and UUIDs become text in keys and properties, as str() writes them. The
        broker's queues take turns unless `queue` names one. A topic that does not exist is created, if the broker
        allows it. Sends of several threads share a connection and do not wait for one another.

        While no broker answers, the send is tried again until the timeout; the broker stores what was tried several
        times once. After TimedOut or Disconnected the message may be stored, so that a second call of the caller's may
        store it twice, unless it has `once`: within 72 hours, or what the broker is set to, a topic takes one message
        of each id. Another call with the same id and body stores nothing and returns the receipt of that message, also
        from another process, and whatever has become of the message. Another body raises IllegalMessage.

        Raises UsageError for arguments that contradict each other, and what the class tells.
        """
        sending = self._client.send(
            topic, body, delay=delay, at=at, level=level, key=key, tag=tag, properties=properties, queue=queue,
            once=once,
        )  # fmt: skip
        return self._loop.run(sending)

    def send_batch(self, topic: str, messages: Iterable[Outgoing]) -> list[Receipt]:
        """Sends many messages, as many as fit in one request; returns their receipts in the same order.

        Nothing is sent if one of them cannot be written. If a request fails, those before it have been stored, and
        the timeout and the repeats of `send` count for each request.
        """
        return self._loop.run(self._client.send_batch(topic, list(messages)))

    # -- one message, or all of a key

    def find(self, topic: str, key: Text, *, limit: int = FIND_LIMIT_DEFAULT) -> list[FoundMessage]:
        """Finds the messages of a topic by one of their keys or by their id, newest first: those that wait, and where
        (`place`), and those that were visible or cancelled, as long as the log has them. At most 64 in one answer.

        Messages that only the pipeline's table has are found by their id and the first of their keys. Where the table
        cannot be asked, the log says so; raises Unavailable if nothing was found besides.
        """
        return self._loop.run(self._client.find(topic, key, limit=limit))

    @overload
    def cancel(self, receipt: Receipt | str) -> Cancelled: ...

    @overload
    def cancel(self, *, topic: str, key: Text, only: bool = False) -> list[CancelledMessage]: ...

    def cancel(
        self, receipt: Receipt | str | None = None, *, topic: str | None = None, key: Text | None = None,
        only: bool = False,
    ) -> Cancelled | list[CancelledMessage]:  # fmt: skip
        """Cancels a delayed message by its receipt, or by the text of its receipt; tells what has become of it.

        CANCELLED: it waited, and no consumer will see it. DELIVERED: it was visible already. UNKNOWN: the broker found
        no such message. RocketMQ itself does not tell, so that its success is UNKNOWN too, and so is a message whose
        broker gave no handle. Tried again as a send is; a repeated cancel is answered as the first one.

        With `topic` and `key` it cancels all messages of the key that wait, and tells of each message of the key what
        has become of it; an empty list says that there is none. `only=True` refuses to change anything where several
        wait. Only Postdate knows this.

        Raises UsageError for a text that is no handle; Refused where the broker does not accept the handle, where
        `only` meets several messages, and for a key of more than 1,000; Unavailable where messages may be in the
        pipeline's table and that cannot be asked: then nothing was changed.
        """
        return self._loop.run(self._client.keys.cancel(receipt, topic, key, only=only))

    def cancel_key(self, topic: str, key: Text, due: datetime | int) -> Cancelled:
        """Cancels by the first of the message's keys and the instant it is due (a datetime or epoch milliseconds).

        Only Postdate knows this; another broker refuses it.
        """
        return self._loop.run(self._client.cancel_key(topic, key, due))

    @overload
    def postpone(
        self, receipt: Receipt | str, *, at: datetime | None = None, delay: Delay | None = None, by: Delay | None = None
    ) -> MovedMessage: ...

    @overload
    def postpone(
        self, *, topic: str, key: Text, at: datetime | None = None, delay: Delay | None = None,
        by: Delay | None = None, only: bool = False,
    ) -> list[MovedMessage]: ...  # fmt: skip

    def postpone(
        self, receipt: Receipt | str | None = None, *, topic: str | None = None, key: Text | None = None,
        at: datetime | None = None, delay: Delay | None = None, by: Delay | None = None, only: bool = False,
    ) -> MovedMessage | list[MovedMessage]:  # fmt: skip
        """Gives a message that waits another due, later or earlier: by its receipt or the text of it, or all that wait
        of a key. Exactly one of these says which: `at`, a datetime with a time zone; `delay`, a span from now by the
        broker's clock; `by`, a span from the due that it has, such as "2h", "-10m" or timedelta(minutes=-10). A due
        that has passed delivers the message at once. Its receipt stays good.

        MOVED: it waited, and now waits for its new due, or is visible. DELIVERED: it was visible before. UNKNOWN: no
        such message waits; nothing was changed. Topic, key and `only` mean what they mean to `cancel`, and only
        Postdate knows this.

        Tried again as a send is, but with `by` only while no broker has got it: after TimedOut or Disconnected it may
        have been moved. Raises what `cancel` raises, and UsageError for a due beyond the broker's longest delay.
        """
        return self._loop.run(
            self._client.keys.move("postpone", receipt, topic, key, wish_of(at, delay, by), only=only)
        )

    @overload
    def deliver_now(self, receipt: Receipt | str) -> MovedMessage: ...

    @overload
    def deliver_now(self, *, topic: str, key: Text, only: bool = False) -> list[MovedMessage]: ...

    def deliver_now(
        self, receipt: Receipt | str | None = None, *, topic: str | None = None, key: Text | None = None,
        only: bool = False,
    ) -> MovedMessage | list[MovedMessage]:  # fmt: skip
        """Delivers a message that waits at once, or all that wait of a key: `postpone` with a delay of 0. Tried again
        after an answer that was lost, it may find its message DELIVERED.
        """
        return self._loop.run(
            self._client.keys.move("deliver_now", receipt, topic, key, wish_of(None, 0, None), only=only)
        )

    # -- by predicate

    def cancel_where(self, where: str, *, id: str | None = None) -> Changed:
        """Cancels every message that waits and that a predicate of Spark SQL selects, over the columns of `pending`;
        returns when it is done. Asked again with the same id, it answers with the first result.

        Raises UsageError where the predicate is refused: then nothing was changed. Only Postdate knows this.
        """
        return self._loop.run(self._client.cancel_where(where, id=id))

    def postpone_where(self, where: str, by: Delay, *, id: str | None = None) -> Changed:
        """Postpones, as `cancel_where` cancels: `postpone_where("topic = 'sms'", by="2h")`. A receipt still cancels
        what was postponed.
        """
        return self._loop.run(self._client.postpone_where(where, by, id=id))

    # -- groups

    def dead_letters(
        self, group: str, *, topic: str | None = None, key: Text | None = None, since: datetime | None = None,
        until: datetime | None = None, reason: str | None = None, limit: int | None = LIMIT_DEFAULT,
    ) -> list[DeadLetter]:  # fmt: skip
        """The messages that a group gave up on and that nobody has resent or deleted, oldest first.

        They may be chosen by the `topic` that they were sent to, one of their keys, when they died (from `since` on,
        before `until`, with time zones), and a part of the `reason`. At most `limit` are returned; None for all.

        Only Postdate knows this. Raises GroupNotFound.
        """
        return self._loop.run(
            self._client.dead_letters(group, topic=topic, key=key, since=since, until=until, reason=reason, limit=limit)
        )

    def resend_dead_letters(self, letters: Iterable[DeadLetter]) -> list[Receipt]:
        """Sends dead letters to the topics that they came from, with their ids, bodies, keys, tags and properties, to
        be received at once; all groups of the topic receive them. A letter is done with when its message is stored. If
        some fail, the first error is raised, and those that failed stay. A letter that is resent again within 15
        minutes is stored once.
        """
        return self._loop.run(self._client.resend_dead_letters(letters))

    def delete_dead_letters(self, letters: Iterable[DeadLetter]) -> int:
        """Marks dead letters as done, so that they are not listed any more; returns how many were still listed."""
        return self._loop.run(self._client.delete_dead_letters(letters))

    def reset_group(
        self, group: str, to: ResetTo, *, topic: str | None = None, dry_run: bool = False
    ) -> list[QueueReset]:
        """Moves a group to "earliest", to "latest", or to the first message that became visible at or after an instant
        (a datetime with a time zone, or epoch milliseconds): in one topic, or in all that it reads. Returns for each
        queue where the group was and where it is now. With `dry_run` nothing moves, and the answer says what would.

        Messages that the group has in work or that wait for another try stay with it: they are neither skipped nor
        given twice. Raises GroupNotFound, TopicNotFound, UsageError.
        """
        return self._loop.run(self._client.reset_group(group, to, topic=topic, dry_run=dry_run))

    # -- receiving

    def consume(
        self, topic: str, group: str, *, tag: str = "*", from_: From = "first", batch: int = BATCH_DEFAULT,
        prefetch: int = PREFETCH_DEFAULT, idle: Delay | None = None,
    ) -> Generator[ReceivedMessage, None, None]:  # fmt: skip
        """Receives as a member of a group: `for message in client.consume("orders", group="billing")`.

        The queues of the topic are shared out among the members of the group, Java ones included, so each message
        goes to one of them. Asking for the next message acknowledges the current one; it waits until there is one.
        Leaving the loop, by break or by an exception, leaves the current one unacknowledged and commits the others at
        once; it comes again at once, as its next attempt, and so may others after a crash: delivery is at least once.

        `tag` filters: "*" for all, or "paid || refunded". A group that is new begins at the first message there is,
        or behind the last one with `from_="last"`. Pulls ask for `batch` messages; at most `prefetch` wait here. A
        topic that does not exist is waited for. The loop ends when no message has come for `idle`, a span as `delay`
        of `send`; without it, never.

        The first step raises what the class tells; later, lost connections are made anew without a word but the log's.
        """
        wanted = Wanted(topic, group, tag, from_, batch, prefetch, idle_ms=None if idle is None else delay_ms(idle))
        wanted.check()
        return self._received(wanted)

    def _received(self, wanted: Wanted) -> Generator[ReceivedMessage, None, None]:
        consumer = self._join(wanted)
        if consumer is None:
            return
        turn: Turn | None = None
        at_hand: Delivery | None = None
        try:
            while (turn := consumer.next(turn)) is not None:
                for at_hand in turn:
                    yield ReceivedMessage(at_hand, consumer)
                    at_hand.settle()
            consumer.leave(self._timeout)
        finally:
            consumer.leave(at_hand=at_hand)

    def _join(self, wanted: Wanted, *, is_patient: bool = False) -> _FarConsumer | None:
        """None if the client is closed meanwhile: that ends loops, and is no fault of theirs."""
        if self._is_closed:
            raise Closed
        with suppress(Closed):
            joined = self._loop.run(self._client.join(wanted, is_patient=is_patient))
            return _FarConsumer(joined, self._client, self._loop)
        return None

    def listen(
        self, topic: str, group: str, handler: Handler, *, tag: str = "*", threads: int = 1, ordered: bool = False,
        retry: Sequence[Delay] | None = None, attempts: int | None = None,
    ) -> None:  # fmt: skip
        """Calls `handler(message)` for every message, until `stop` or `close` is called, or until SIGTERM or Ctrl-C.

        A handler that returns acknowledges its message. If it raises, the message comes again, unless the handler has
        called `acknowledge` or `retry`: after the delays of `retry`, such as ["1s", "10s", "1m"], of which the last
        holds for all later attempts, else after those of the group's settings, else after the broker's (10 s, 30 s,
        1 m, ...). After `attempts` in all, else the group's, else the broker's number (17), it is a dead letter, in the
        topic %DLQ%group. A coroutine function is refused: nobody would await it.

        Any number of `threads` and processes share a topic message by message; there is no order. The broker lends each
        message for 30 s, and the client renews that while the handler works. With `ordered=True` the members share
        queues, as those of `consume` do: messages of one queue are handled one after the other, those of several
        queues at once. With one thread the handler runs in the caller's.

        In the main thread, SIGTERM and SIGINT (Ctrl-C) do what `stop` does, and `listen` returns; a second one ends it
        at once, as Python does by default. A signal that has a handler other than Python's own is left to that one.

        A broker that is not there is waited for, and the log says so. Otherwise as `consume`.
        """
        if threads < 1:
            raise UsageError(f"threads is {threads}, expected 1 or more")
        if is_coroutine_function(handler):
            raise UsageError(f"{_AWAITABLE}: give it to the listen of postdate.connect_async")
        wanted = wanted_by_listener(topic, group, tag, threads, ordered, retry, attempts)
        with stop_on_signals(self._stop_by_signal):
            consumer = self._join(wanted, is_patient=True)
            if consumer is None:
                return
            try:
                if threads == 1:
                    _handle_all(consumer, handler)
                else:
                    _handle_in_threads(consumer, handler, threads)
                consumer.leave(self._timeout)
            finally:
                consumer.leave()

    def _stop_by_signal(self) -> None:
        self._client.forbid_taking()
        self._loop.post(self._client.stop_taking)


_AWAITABLE = "the handler is a coroutine function, which the blocking client cannot await"


def _handle_all(consumer: _FarConsumer, handler: Handler) -> None:
    turn: Turn | None = None
    work: Callable[[ReceivedMessage], object] = handler
    while (turn := consumer.next(turn)) is not None:
        for delivery in turn:
            try:
                result = work(ReceivedMessage(delivery, consumer))
            except Exception as error:
                if not consumer.give_back(delivery, error):
                    continue
            else:
                if result is not None and isawaitable(result):
                    if iscoroutine(result):
                        result.close()  # or Python warns that nobody has awaited it
                    raise UsageError(
                        f"{_AWAITABLE}, though it did not look like one; message {delivery.id} comes again"
                    )
            delivery.settle()


def _handle_in_threads(consumer: _FarConsumer, handler: Handler, count: int) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            _handle_all(consumer, handler)
        except BaseException as error:
            failures.append(error)
        finally:  # all end with the first
            consumer.stop()

    workers = [threading.Thread(target=work, name=f"postdate-listen-{n}", daemon=True) for n in range(count)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            while worker.is_alive():
                worker.join(LIFE_SIGN_SECONDS)
    except BaseException:  # an interrupt: handlers at work go on in their threads until they or the process end
        consumer.stop()
        raise
    if failures:
        raise failures[0]


def connect(
    address: str | None = None, *, timeout: float = TIMEOUT_SECONDS_DEFAULT, access_key: str | None = None,
    secret_key: str | None = None, security_token: str | None = None, tls: bool | None = None,
    ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None,
) -> Client:  # fmt: skip
    """A client of the broker whose route address this is; "a:9876;b:9876" names several.

    Without an address, of POSTDATE_ADDR, else of 127.0.0.1:9876. Nothing is connected before it is needed.

    `access_key` is the name of a user and `secret_key` the secret that signs what the client sends; `security_token`
    is for brokers that want one, too. `tls` encrypts connections: the broker's certificate must be for the host of its
    address, and signed by an authority in `ca_file`, else by one that this system trusts. `cert_file` and `key_file`
    are a certificate of the client's own. What is not given is taken from the environment (POSTDATE_ACCESS_KEY and so
    on), else from ~/.config/postdate/credentials.toml: credentials and TLS each from the first that has any of them.
    """
    return Client(
        address, timeout=timeout, access_key=access_key, secret_key=secret_key, security_token=security_token, tls=tls,
        ca_file=ca_file, cert_file=cert_file, key_file=key_file,
    )  # fmt: skip
