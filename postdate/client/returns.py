"""Messages that a consumer sends back, to receive them again later."""

import logging
from collections.abc import Mapping
from typing import Any

from postdate.client.backlog import Delivery
from postdate.client.errors import TimedOut, Unreachable, expect_success
from postdate.client.membership import Membership
from postdate.client.options import Wanted
from postdate.client.producer import Producer
from postdate.errors import PostdateError
from postdate.message import (
    DELAY_PROPERTIES,
    INTERNAL_PROPERTIES,
    PROPERTY_DELAY,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELAY_MS,
)
from postdate.spans import Delay, delay_ms
from postdate.wire.requests import Request

log = logging.getLogger("postdate.client")

FIRST_RETRY_LEVEL = 3  # 10 s by default; each further retry is one level later, as the broker itself does it
_NOT_SENT_ON = DELAY_PROPERTIES | INTERNAL_PROPERTIES | {PROPERTY_TIMER_DEL_UNIQKEY}
_SYS_FLAG_KEPT = 0x0703  # compressed or not and how, several tags; hosts and transactions are each broker's own


class Returns:
    """Sends messages of one consumer back; what was sent back is then the caller's to settle.

    Each call raises what the broker answers; then nothing has changed.
    """

    def __init__(self, wanted: Wanted, membership: Membership, producer: Producer) -> None:
        self._wanted, self._membership, self._producer = wanted, membership, producer

    async def retry(self, delivery: Delivery, delay: Delay | None) -> None:
        """It comes again after a delay, or after the broker's growing delays."""
        if delay is None:
            await self._send_back(delivery)
        else:
            await self._send_on(delivery, {PROPERTY_TIMER_DELAY_MS: str(max(delay_ms(delay), 1))})

    async def give_back(self, delivery: Delivery) -> None:
        """It comes again after the broker's growing delays; where the broker cannot do it, we send it anew."""
        try:
            await self._send_back(delivery)
        except (Unreachable, TimedOut):
            raise
        except PostdateError as error:
            log.debug("message %s is sent on, because: %s", delivery.id, error)
            level = FIRST_RETRY_LEVEL + delivery.record.reconsume_times
            await self._send_on(delivery, {PROPERTY_DELAY: str(level)})

    async def _send_back(self, delivery: Delivery) -> None:
        """The broker has the message: it needs only its place."""
        fields: dict[str, Any] = {
            "group": self._wanted.group, "offset": delivery.record.offset, "delayLevel": 0,
            "originMsgId": delivery.id, "originTopic": delivery.topic, "unitMode": "false",
            "bname": delivery.origin.queue.name.broker_name,
        }  # fmt: skip
        if self._wanted.reconsume_times_max is not None:
            fields["maxReconsumeTimes"] = self._wanted.reconsume_times_max
        expect_success(
            await self._membership.ask(delivery.origin.queue.address, Request.CONSUMER_SEND_MSG_BACK, fields)
        )

    async def _send_on(self, delivery: Delivery, timing: Mapping[str, str]) -> None:
        """A message like it, to the retry topic."""
        record = delivery.record
        properties = {name: value for name, value in delivery.properties.items() if name not in _NOT_SENT_ON}
        properties |= {PROPERTY_RETRY_TOPIC: delivery.topic, **timing}
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, delivery.id)
        await self._producer.send_on(
            self._wanted.retry_topic, record.body, properties, record.sys_flag & _SYS_FLAG_KEPT,
            record.reconsume_times + 1, self._wanted.reconsume_times_max,
        )  # fmt: skip
