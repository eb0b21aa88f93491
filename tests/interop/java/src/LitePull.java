import java.util.Collection;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/** The consumer that is asked: queues shared out in its group, or chosen by hand and read from a chosen place. */
final class LitePull {
    private static final String TOPIC = "lite";
    private static final long PROMPT_MS = 15_000; // without a notice from the broker it takes 20 s

    private static DefaultMQProducer producer;
    private static int clients;

    public static void main(String[] arguments) {
        Interop.run(arguments, LitePull::tell);
    }

    private static void tell() throws Exception {
        producer = Interop.producer("lite-producer");
        Interop.createTopic(producer, TOPIC, 4);
        for (Message message : Interop.messages(TOPIC, "lite", 100)) {
            producer.send(message);
        }
        subscribe();
        assign();
        producer.shutdown();
    }

    private static void subscribe() throws Exception {
        Inbox first = new Inbox();
        DefaultLitePullConsumer consumer = consumer("lite-group");
        consumer.subscribe(TOPIC, "*");
        consumer.setAutoCommit(false);
        long startedAtMs = System.currentTimeMillis();
        consumer.start();
        polled(consumer, first, "lite", 100);
        long tookMs = System.currentTimeMillis() - startedAtMs;
        Interop.check(tookMs < PROMPT_MS, "a lite pull consumer got its messages only after " + tookMs + " ms");
        consumer.commit();
        consumer.shutdown();
        Interop.ok("subscribed, a lite pull consumer had all hundred messages " + tookMs + " ms after its start");

        Message timed = Interop.message(TOPIC, "later timed");
        timed.setDelayTimeMs(1_000);
        producer.send(timed);
        Inbox second = new Inbox();
        DefaultLitePullConsumer next = consumer("lite-group");
        next.subscribe(TOPIC, "*");
        next.start();
        polled(next, second, "later", 1);
        next.shutdown();
        Interop.same(0L, second.count("lite"), "messages that the group had committed before");
        Interop.ok("the next one of its group goes on where it had committed, and gets a timed message");
    }

    private static void assign() throws Exception {
        DefaultLitePullConsumer consumer = consumer("lite-assigned");
        consumer.start();
        Collection<MessageQueue> queues = consumer.fetchMessageQueues(TOPIC);
        Interop.same(4, queues.size(), "queues of the topic");
        MessageQueue queue = queues.iterator().next();
        consumer.assign(List.of(queue));

        consumer.seek(queue, 20);
        Inbox middle = new Inbox();
        Interop.until("something from offset 20", () -> !poll(consumer, middle).all().isEmpty());
        Interop.same(20L, middle.all().get(0).message.getQueueOffset(), "the first offset after seek(20)");
        Interop.ok("assigned, it reads from the offset it sought");

        consumer.seekToBegin(queue);
        Inbox head = new Inbox();
        Interop.until("something from the begin", () -> !poll(consumer, head).all().isEmpty());
        Interop.same(0L, head.all().get(0).message.getQueueOffset(), "the first offset after seekToBegin");

        consumer.seekToEnd(queue);
        Inbox tail = new Inbox();
        producer.send(Interop.message(TOPIC, "tail"), queue);
        Interop.until("what was sent after seekToEnd", () -> poll(consumer, tail).count("tail") > 0);
        // The client may still hand out what a pull brings that was under way when it sought: ten messages, its batch.
        int early = tail.all().size() - 1;
        Interop.same("tail", tail.all().get(early).text, "the last message after seekToEnd");
        Interop.same(true, early <= 10, "messages of one pull at most before it: " + early);
        Interop.ok("it seeks to the begin and to the end");

        Interop.same(0L, consumer.offsetForTimestamp(queue, 0L), "the offset for the beginning of time");
        consumer.commit();
        Interop.until("its offset is committed", () -> consumer.committed(queue) > 20);
        consumer.shutdown();
        Interop.ok("it finds an offset by time, and its commit is kept: " + tail.all().get(early).message.getQueueOffset());
    }

    private static void polled(DefaultLitePullConsumer consumer, Inbox inbox, String prefix, int count) throws Exception {
        Interop.until(count + " messages of " + prefix, () -> poll(consumer, inbox).count(prefix) >= count);
    }

    private static Inbox poll(DefaultLitePullConsumer consumer, Inbox inbox) {
        inbox.add(consumer.poll(200));
        return inbox;
    }

    private static DefaultLitePullConsumer consumer(String group) {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group, Interop.signing());
        consumer.setNamesrvAddr(Interop.route);
        consumer.setInstanceName("lite-" + ++clients);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }
}
