import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/** Several consumers: sharing, each getting all, in order, some tags only. */
final class Groups {
    private static final long AT_ONCE_MS = 15_000; // a client looks by itself only every 20 s

    private static DefaultMQProducer producer;

    public static void main(String[] arguments) {
        Interop.run(arguments, Groups::tell);
    }

    private static void tell() throws Exception {
        producer = Interop.producer("groups-producer");
        joinAndLeave();
        orderly();
        broadcast();
        tags();
        otherTags();
        producer.shutdown();
    }

    // -- sharing ----------------------------------------------------------------------------------------------------

    private static void joinAndLeave() throws Exception {
        String topic = "groups-shared";
        Interop.createTopic(producer, topic, 8);
        Inbox first = new Inbox();
        Inbox second = new Inbox();
        Stream stream = new Stream(topic);
        stream.start();
        DefaultMQPushConsumer one = started("groups-shared-group", topic, first);
        Interop.until("eight queues are read by one", () -> queues(first, 0).size() == 8);

        long joinedAtMs = System.currentTimeMillis();
        DefaultMQPushConsumer two = started("groups-shared-group", topic, second);
        Interop.until("the second gets four queues", () -> queues(second, joinedAtMs).size() == 4);
        long joinMs = System.currentTimeMillis() - joinedAtMs;

        Interop.until("the first keeps the other four", () -> {
            Set<Integer> kept = queues(first, System.currentTimeMillis() - 500);
            return kept.size() == 4 && queues(second, joinedAtMs).stream().noneMatch(kept::contains);
        });
        two.shutdown();
        long leftAtMs = System.currentTimeMillis();
        Interop.until("the first has all eight again", () -> queues(first, leftAtMs).size() == 8);
        long leaveMs = System.currentTimeMillis() - leftAtMs;
        stream.end();

        Interop.until("every message was read", () -> {
            Set<String> missing = ConcurrentHashMap.newKeySet();
            missing.addAll(stream.sent);
            first.all().forEach(arrival -> missing.remove(arrival.text));
            second.all().forEach(arrival -> missing.remove(arrival.text));
            return missing.isEmpty();
        });
        one.shutdown();
        Interop.check(joinMs < AT_ONCE_MS, "a joining consumer got its queues only after " + joinMs + " ms");
        Interop.check(leaveMs < AT_ONCE_MS, "a leaving consumer's queues were free only after " + leaveMs + " ms");
        long read = first.all().size() + second.all().size();
        Interop.ok("queues were shared out " + joinMs + " ms after a consumer joined, " + leaveMs + " ms after it left");
        Interop.ok("of " + stream.sent.size() + " messages none was lost, " + (read - stream.sent.size()) + " came twice");
    }

    private static Set<Integer> queues(Inbox inbox, long sinceMs) {
        Set<Integer> queues = ConcurrentHashMap.newKeySet();
        inbox.all().stream().filter(arrival -> arrival.atMs >= sinceMs).forEach(arrival ->
                queues.add(arrival.message.getQueueId()));
        return queues;
    }

    /** Sends one message after the other until it is ended. */
    private static final class Stream extends Thread {
        final Set<String> sent = ConcurrentHashMap.newKeySet();
        private final AtomicReference<Exception> failure = new AtomicReference<>();
        private final String topic;
        private volatile boolean ended;

        Stream(String topic) {
            this.topic = topic;
        }

        @Override
        public void run() {
            try {
                while (!ended) {
                    String text = "stream-" + sent.size();
                    producer.send(Interop.message(topic, text));
                    sent.add(text);
                    Thread.sleep(2);
                }
            } catch (Exception error) {
                failure.set(error);
            }
        }

        void end() throws Exception {
            ended = true;
            join();
            Interop.check(failure.get() == null, "a send failed: " + failure.get());
        }
    }

    // -- order ------------------------------------------------------------------------------------------------------

    private static void orderly() throws Exception {
        String topic = "groups-orderly";
        Interop.createTopic(producer, topic, 4);
        for (Message message : Interop.messages(topic, "order", 200)) {
            producer.send(message);
        }
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer one = startedOrderly("groups-orderly-group", topic, inbox);
        DefaultMQPushConsumer two = startedOrderly("groups-orderly-group", topic, inbox);
        for (Message message : Interop.messages(topic, "order more", 200)) {
            producer.send(message);
        }
        inbox.awaitAll("order", 400);
        one.shutdown();
        two.shutdown();
        Map<Integer, Long> last = new HashMap<>();
        int again = 0;
        for (Inbox.Arrival arrival : inbox.all()) {
            long before = last.getOrDefault(arrival.message.getQueueId(), -1L);
            long offset = arrival.message.getQueueOffset();
            // What was read but not committed when a queue changed hands is read again, from there on in order.
            Interop.check(offset <= before + 1, "queue " + arrival.message.getQueueId() + " jumped over " + (before + 1));
            again += offset <= before ? 1 : 0;
            last.put(arrival.message.getQueueId(), offset);
        }
        Interop.ok("two orderly consumers read 400 messages, each queue in its order; " + again + " came twice");
    }

    private static DefaultMQPushConsumer startedOrderly(String group, String topic, Inbox inbox) throws Exception {
        DefaultMQPushConsumer consumer = Interop.consumer(group, topic, "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            inbox.add(messages);
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    // -- all for each -----------------------------------------------------------------------------------------------

    private static void broadcast() throws Exception {
        String topic = "groups-broadcast";
        Interop.createTopic(producer, topic, 4);
        List<Inbox> inboxes = List.of(new Inbox(), new Inbox());
        for (Inbox inbox : inboxes) {
            DefaultMQPushConsumer consumer = Interop.consumer("groups-broadcast-group", topic, "*");
            consumer.setMessageModel(MessageModel.BROADCASTING);
            consumer.registerMessageListener(inbox);
            consumer.start();
        }
        for (Message message : Interop.messages(topic, "broadcast", 50)) {
            producer.send(message);
        }
        for (Inbox inbox : inboxes) {
            inbox.awaitAll("broadcast", 50);
        }
        Interop.ok("each of two broadcasting consumers got all fifty messages");
    }

    // -- tags -------------------------------------------------------------------------------------------------------

    private static void tags() throws Exception {
        String topic = "groups-tags";
        Interop.createTopic(producer, topic, 1);
        for (int i = 0; i < 20; i++) {
            for (String tag : new String[] {"a", "b", "c"}) {
                producer.send(new Message(topic, tag, (tag + "-" + i).getBytes()));
            }
        }
        Inbox some = new Inbox();
        Inbox all = new Inbox();
        DefaultMQPushConsumer consumer = Interop.consumer("groups-tags-group", topic, "a || b");
        consumer.registerMessageListener(some);
        consumer.start();
        DefaultMQPushConsumer other = started("groups-tags-all", topic, all);
        Message timed = new Message(topic, "b", "b-timed".getBytes());
        timed.setDelayTimeMs(500);
        producer.send(timed);
        some.awaitAll("b", 21);
        all.awaitAll("", 61);
        consumer.shutdown();
        other.shutdown();
        Interop.same(20L, some.count("a"), "messages with tag a");
        Interop.same(0L, some.count("c"), "messages with tag c at a consumer of a || b");
        Interop.ok("a subscription to a || b gets those tags, delayed or not, and no other");
    }

    /** The pull that waits was asked with the old tags. What comes after the change must not be lost to it. */
    private static void otherTags() throws Exception {
        String topic = "groups-other-tags";
        Interop.createTopic(producer, topic, 1);
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = Interop.consumer("groups-other-tags-group", topic, "a");
        consumer.registerMessageListener(inbox);
        consumer.start();
        producer.send(new Message(topic, "b", "b before".getBytes()));
        producer.send(new Message(topic, "a", "a before".getBytes()));
        inbox.await("a before");
        consumer.subscribe(topic, "b"); // returns when the broker knows
        producer.send(new Message(topic, "b", "b after".getBytes()));
        inbox.await("b after");
        consumer.shutdown();
        Interop.check(!inbox.has("b before"), "a message of a tag that was not subscribed to arrived");
        Interop.ok("a consumer that changes its tags gets every message of the new ones");
    }

    private static DefaultMQPushConsumer started(String group, String topic, Inbox inbox) throws Exception {
        DefaultMQPushConsumer consumer = Interop.consumer(group, topic, "*");
        consumer.registerMessageListener(inbox);
        consumer.start();
        return consumer;
    }
}
