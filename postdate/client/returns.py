"""Messages that a consumer gives back, to receive them again later."""

import logging
from collections.abc import Mapping
from typing import Any

from postdate.client.backlog import Delivery, PulledDelivery
from postdate.client.errors import TimedOut, Unreachable, expect_success
from postdate.client.leases import LeasedDelivery, Leases, Outcome, outcome_of
from postdate.client.membership import Membership
from postdate.client.options import Wanted
from postdate.client.producer import Producer
from postdate.client.routes import Routes
from postdate.errors import PostdateError
from postdate.message import (
    DELAY_PROPERTIES,
    INTERNAL_PROPERTIES,
    ONCE_PROPERTIES,
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELAY_MS,
    REASON_CHARACTERS_MAX,
)
from postdate.wire import codes
from postdate.wire.requests import Request

log = logging.getLogger("postdate.client")

FIRST_RETRY_LEVEL = 3  # 10 s by default; each further retry is one level later, as the broker itself does it
_NOT_SENT_ON = DELAY_PROPERTIES | INTERNAL_PROPERTIES | ONCE_PROPERTIES | {PROPERTY_TIMER_DEL_UNIQKEY}
_SYS_FLAG_KEPT = 0x0703  # compressed or not and how, several tags; hosts and transactions are each broker's own


class Returns:
    """Has messages of one consumer come again; they are settled then.

    Postdate gives them again in place, in their own queue at their own offset. RocketMQ has a retry topic for them.
    Each call raises what the broker answers; then nothing has changed.
    """

    def __init__(
        self, wanted: Wanted, membership: Membership, leases: Leases, producer: Producer, routes: Routes
    ) -> None:
        self._wanted, self._membership, self._leases, self._producer = wanted, membership, leases, producer
        self._routes = routes

    async def retry(self, delivery: Delivery, delay_ms: int, reason: str) -> Outcome:
        """It comes again after a delay, or after the broker's growing delays (-1)."""
        if isinstance(delivery, LeasedDelivery):
            return await self._leases.fail(delivery, delay_ms, reason)
        assert isinstance(delivery, PulledDelivery), delivery
        if self._routes.is_postdate:
            outcome = await self._retry_in_place(delivery, delay_ms, reason)
        elif delay_ms < 0:
            outcome = await self._send_back(delivery)
        else:
            outcome = await self._send_on(delivery, {PROPERTY_TIMER_DELAY_MS: str(max(delay_ms, 1))})
        delivery.settle()
        return outcome

    async def give_back(self, delivery: Delivery, delay_ms: int, reason: str) -> Outcome:
        """As `retry`; where RocketMQ cannot do it, we send it anew."""
        try:
            return await self.retry(delivery, delay_ms, reason)
        except (Unreachable, TimedOut):
            raise
        except PostdateError as error:
            if self._routes.is_postdate:
                raise
            log.debug("message %s is sent on, because: %s", delivery.id, error)
            level = FIRST_RETRY_LEVEL + delivery.record.reconsume_times
            outcome = await self._send_on(delivery, {PROPERTY_DELAY: str(level)})
            delivery.settle()
            return outcome

    async def abandon(self, delivery: Delivery) -> None:
        """Its loop was left: it comes again at once, as another attempt. RocketMQ gives it again as the same one."""
        if isinstance(delivery, LeasedDelivery) or self._routes.is_postdate:
            await self.retry(delivery, 0, "the loop was left before it asked for the next message")

    async def _retry_in_place(self, delivery: PulledDelivery, delay_ms: int, reason: str) -> Outcome:
        queue = delivery.origin.queue
        fields: dict[str, Any] = {
            "consumerGroup": self._wanted.group, "topic": queue.name.topic, "queueId": queue.name.queue_id,
            "offset": delivery.queue_offset, "delay": delay_ms, "reason": reason[:REASON_CHARACTERS_MAX],
            "times": delivery.record.reconsume_times, "bname": queue.name.broker_name,
        }  # fmt: skip
        if self._wanted.reconsume_times_max is not None:
            fields["maxReconsumeTimes"] = self._wanted.reconsume_times_max
        answer = await self._membership.ask(queue.address, Request.RETRY_MESSAGE, fields)
        if answer.code == codes.NO_MESSAGE:
            log.warning("message %s does not come again: %s", delivery.id, answer.remark)
            return Outcome()
        return outcome_of(expect_success(answer).fields, "delay")

    async def _send_back(self, delivery: PulledDelivery) -> Outcome:
        """The broker has the message: it needs only its place."""
        fields: dict[str, Any] = {
            "group": self._wanted.group, "offset": delivery.record.offset, "delayLevel": 0,
            "originMsgId": delivery.id, "originTopic": delivery.topic, "unitMode": "false",
            "bname": delivery.origin.queue.name.broker_name,
        }  # fmt: skip
        if self._wanted.reconsume_times_max is not None:
            fields["maxReconsumeTimes"] = self._wanted.reconsume_times_max
        queue = delivery.origin.queue
        expect_success(await self._membership.ask(queue.address, Request.CONSUMER_SEND_MSG_BACK, fields))
        return Outcome()

    async def _send_on(self, delivery: Delivery, timing: Mapping[str, str]) -> Outcome:
        """A message like it, to the retry topic."""
        record = delivery.record
        properties = {name: value for name, value in delivery.properties.items() if name not in _NOT_SENT_ON}
        properties |= {PROPERTY_RETRY_TOPIC: delivery.topic, **timing}
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, delivery.id)
        await self._producer.send_on(
            self._wanted.retry_topic, record.body, properties, record.sys_flag & _SYS_FLAG_KEPT,
            record.reconsume_times + 1, self._wanted.reconsume_times_max,
        )  # fmt: skip
        return Outcome()
