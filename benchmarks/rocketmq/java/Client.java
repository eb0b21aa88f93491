import java.nio.ByteBuffer;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.Consumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** A producer, a topic of its own with eight queues, and a push consumer where one is wanted. */
final class Client extends Load<Message, SendResult> {
    static final int QUEUES = 8;
    static final int IN_FLIGHT = 256;
    private static final int LISTENER_BATCH = 32;

    final String topic;
    final DefaultMQProducer producer;
    final List<MessageQueue> queues;
    private final String address;
    private DefaultMQPushConsumer consumer;

    Client(String address, String topic) throws Exception {
        super(IN_FLIGHT);
        this.address = address;
        this.topic = topic;
        producer = new DefaultMQProducer("bench-producers");
        producer.setNamesrvAddr(address);
        producer.setSendMsgTimeout(30_000);
        producer.start();
        queues = madeTopic();
    }

    /** The topic's queues, once the name server knows all of them: a send before that would make fewer. */
    private List<MessageQueue> madeTopic() throws Exception {
        AtomicReference<List<MessageQueue>> found = new AtomicReference<>(List.of());
        until("the route of " + topic, () -> {
            try {
                if (found.get().isEmpty()) {
                    producer.createTopic("TBW102", topic, QUEUES, null); // a broker that has just started may refuse
                }
                found.set(producer.fetchPublishMessageQueues(topic));
            } catch (MQClientException error) {
                return false; // not known yet
            }
            return found.get().size() == QUEUES;
        });
        return found.get();
    }

    // -- sending ----------------------------------------------------------------------------------------------------

    @Override
    Message message(long fromMicros) {
        return new Message(topic, body(fromMicros));
    }

    @Override
    Message timed(long dueAtMs) {
        Message message = message(dueAtMs * 1_000);
        message.setDeliverTimeMs(dueAtMs);
        return message;
    }

    @Override
    void sendAsync(Message message, Consumer<SendResult> stored, Runnable then) throws Exception {
        producer.send(message, new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                note(result);
                stored.accept(result);
                then.run();
            }

            @Override
            public void onException(Throwable error) {
                fail(error);
                then.run();
            }
        });
    }

    @Override
    void sendAndWait(Message message) throws Exception {
        note(producer.send(message));
    }

    /** Anything but stored as asked is a failure of the measure. */
    private void note(SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            fail(new IllegalStateException("a send was answered " + result.getSendStatus()));
        }
    }

    // -- receiving --------------------------------------------------------------------------------------------------

    interface Listener {
        /** A message and when it came. Returns whether it is done with. */
        boolean got(MessageExt message, long atMicros, ConsumeConcurrentlyContext context);
    }

    /** Starts a consumer of a new group and returns when it has read from every queue. */
    void listen(int batch, Listener listener) throws Exception {
        Set<Integer> reached = ConcurrentHashMap.newKeySet();
        consume(batch, (message, atMicros, context) -> {
            if (fromMicros(message) == PROBE) {
                reached.add(message.getQueueId());
                return true;
            }
            return listener.got(message, atMicros, context);
        });
        for (MessageQueue queue : queues) {
            producer.send(message(PROBE), queue);
        }
        until("every queue is read", () -> reached.size() == QUEUES);
    }

    private void consume(int batch, Listener listener) throws Exception {
        consumer = new DefaultMQPushConsumer("group-" + topic);
        consumer.setNamesrvAddr(address);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(batch);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long atMicros = nowMicros();
            boolean done = true;
            for (MessageExt message : messages) {
                done &= listener.got(message, atMicros, context);
            }
            return done ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
    }

    /** Starts a consumer and does not wait for it: for whoever sends no probes and counts otherwise. */
    void consume(Listener listener) throws Exception {
        consume(LISTENER_BATCH, listener);
    }

    /** Whether the consumer pulls; it takes up to a second to begin again. */
    void pull(boolean wanted) {
        if (wanted) {
            consumer.resume();
        } else {
            consumer.suspend();
        }
    }

    @Override
    void listen(Instants listener) throws Exception {
        listen((message, atMicros, context) -> {
            listener.got(fromMicros(message), atMicros);
            return true;
        });
    }

    /** The same for as many as come: the listener gets them in batches, which is the client's way to be fast. */
    void listen(Listener listener) throws Exception {
        listen(LISTENER_BATCH, listener);
    }

    static long fromMicros(MessageExt message) {
        return ByteBuffer.wrap(message.getBody()).getLong();
    }

    /** What the queues' ends add up to. */
    long visible() throws Exception {
        long visible = 0;
        for (MessageQueue queue : queues) {
            visible += producer.maxOffset(queue);
        }
        return visible;
    }

    @Override
    public void close() {
        if (consumer != null) {
            consumer.shutdown();
        }
        producer.shutdown();
    }
}
