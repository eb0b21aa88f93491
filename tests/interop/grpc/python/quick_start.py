import sys
import threading
import time

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
)

configuration = ClientConfiguration(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081", Credentials())
received = threading.Event()


class Invoices(MessageListener):
    def consume(self, message: Message) -> ConsumeResult:
        print("received:", message.body.decode())
        received.set()
        return ConsumeResult.SUCCESS


consumer = PushConsumer(configuration, "invoicing", Invoices(), {"invoices": FilterExpression()})
consumer.startup()
producer = Producer(configuration, ("invoices",))
producer.startup()

message = Message()
message.topic = "invoices"
message.body = b"pay, please"
message.delivery_timestamp = int(time.time()) + 2
print("sent:", producer.send(message).message_id)

received.wait()
producer.shutdown()
consumer.shutdown()
