import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Consumer;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;

/** A producer, and a push consumer where one is wanted. All messages are delayed ones: the topic takes no others. */
final class GrpcClient extends Load<Message, SendReceipt> {
    private static final int IN_FLIGHT = 64;
    private static final Duration TIMEOUT = Duration.ofSeconds(30);
    private static final int PROBE_COUNT = 64; // of one turn: several for each queue
    private static final long TURN_MS = 2_000;

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final ClientConfiguration configuration;
    private final String topic;
    private final Producer producer;

    GrpcClient(String address, String topic) throws ClientException {
        super(IN_FLIGHT);
        this.topic = topic;
        configuration = ClientConfiguration.newBuilder()
                .setEndpoints(address)
                .enableSsl(false)
                .setRequestTimeout(TIMEOUT)
                .build();
        producer = provider.newProducerBuilder()
                .setClientConfiguration(configuration)
                .setTopics(topic)
                .setMaxAttempts(1) // a send that fails is a failure of the measure
                .build();
    }

    // -- sending ----------------------------------------------------------------------------------------------------

    /** A message due when it is sent, so that it comes at once. */
    @Override
    Message message(long fromMicros) {
        return message(System.currentTimeMillis(), body(fromMicros));
    }

    @Override
    Message timed(long dueAtMs) {
        return message(dueAtMs, body(dueAtMs * 1_000));
    }

    private Message message(long dueAtMs, byte[] body) {
        return provider.newMessageBuilder().setTopic(topic).setBody(body).setDeliveryTimestamp(dueAtMs).build();
    }

    @Override
    void sendAsync(Message message, Consumer<SendReceipt> stored, Runnable then) {
        producer.sendAsync(message).whenComplete((receipt, error) -> {
            if (error == null) {
                stored.accept(receipt);
            } else {
                fail(error);
            }
            then.run();
        });
    }

    @Override
    void sendAndWait(Message message) throws ClientException {
        producer.send(message);
    }

    // -- receiving --------------------------------------------------------------------------------------------------

    /**
     * In RocketMQ a new group begins at the end of a queue, when it first reads there. So probes are sent in turns, round
     * the queues, until all of one turn have come.
     */
    @Override
    void listen(Instants listener) throws Exception {
        AtomicInteger turn = new AtomicInteger();
        AtomicInteger reached = new AtomicInteger();
        AtomicLong turnEndsMs = new AtomicLong();
        consume((body, atMicros) -> {
            long fromMicros = body.getLong();
            if (fromMicros != PROBE) {
                listener.got(fromMicros, atMicros);
            } else if (body.getInt() == turn.get()) {
                reached.incrementAndGet();
            }
        });
        until("every queue is read", () -> {
            if (reached.get() < PROBE_COUNT && System.currentTimeMillis() >= turnEndsMs.get()) {
                turn.incrementAndGet();
                reached.set(0);
                sendProbes(turn.get());
                turnEndsMs.set(System.currentTimeMillis() + TURN_MS);
            }
            return reached.get() == PROBE_COUNT;
        });
        check();
    }

    private void sendProbes(int turn) {
        for (int number = 0; number < PROBE_COUNT; number++) {
            byte[] body = body(PROBE);
            ByteBuffer.wrap(body).putInt(Long.BYTES, turn);
            sendAsync(message(System.currentTimeMillis(), body), receipt -> { }, () -> { });
        }
    }

    private interface Bodies {
        void got(ByteBuffer body, long atMicros);
    }

    private void consume(Bodies bodies) throws ClientException {
        provider.newPushConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup("group-" + topic) // topics.py makes it
                .setSubscriptionExpressions(Map.of(topic, FilterExpression.SUB_ALL))
                .setMessageListener(message -> {
                    bodies.got(message.getBody(), nowMicros());
                    return ConsumeResult.SUCCESS;
                })
                .build();
    }

    /** The consumer ends with the process: to close one takes up to 20 s, for what it has asked the server. */
    @Override
    public void close() {
        try {
            producer.close();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }
}
