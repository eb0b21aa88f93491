"""Topics and groups for gRPC clients, which make none themselves, by the older protocol that both systems speak."""

import json
import time

from benchmarks.rocketmq.program import Failed
from benchmarks.rocketmq.systems import System
from benchmarks.server import Peer, make_topic
from postdate.wire import codes
from postdate.wire.requests import Request

# RocketMQ takes delayed messages over gRPC in such topics alone, and wants the first two fields of every topic.
FIELDS = {"defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG", "attributes": "+message.type=DELAY"}
ROUTE_S, ROUTE_POLL_S = 60.0, 0.02


def group_of(topic: str) -> str:
    """GrpcClient.java knows it."""
    return f"group-{topic}"


def make_topic_and_group(system: System, topic: str) -> str:
    """Makes a topic and the group that will read it, without which RocketMQ's proxy takes no consumer. Returns the
    address for gRPC clients, once the route is known. Raises Failed.
    """
    with Peer(system.broker_address) as broker:
        make_topic(broker, topic, None, **FIELDS)
        settings = json.dumps({"groupName": group_of(topic), "consumeEnable": True}).encode()
        answer = broker.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, settings)
        assert answer.code == codes.SUCCESS, answer
    until = time.monotonic() + ROUTE_S
    with Peer(system.route_address) as names:
        while names.ask(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).code != codes.SUCCESS:
            if time.monotonic() > until:
                raise Failed(f"{system.name} has no route of topic {topic!r} after {ROUTE_S:.0f} s")
            time.sleep(ROUTE_POLL_S)
    return system.grpc_address
