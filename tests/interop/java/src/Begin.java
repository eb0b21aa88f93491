import java.text.SimpleDateFormat;
import java.util.Date;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/** Where a new group begins. The server must run with fresh_queue_bytes = 0, or small topics begin at their head. */
final class Begin {
    private static final String TOPIC = "begin";

    private static DefaultMQProducer producer;

    public static void main(String[] arguments) {
        Interop.run(arguments, Begin::tell);
    }

    private static void tell() throws Exception {
        producer = Interop.producer("begin-producer");
        Interop.createTopic(producer, TOPIC, 1);
        for (Message message : Interop.messages(TOPIC, "old", 10)) {
            producer.send(message);
        }
        // A consumer says the instant in whole seconds, so there must be one between old and young.
        long betweenMs = (System.currentTimeMillis() / 1_000 + 1) * 1_000;
        Interop.until("the next second", () -> System.currentTimeMillis() > betweenMs);
        for (Message message : Interop.messages(TOPIC, "young", 10)) {
            producer.send(message);
        }
        first();
        instant(betweenMs);
        last();
        producer.shutdown();
    }

    private static void first() throws Exception {
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = consumer(inbox, ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        inbox.awaitAll("old", 10);
        inbox.awaitAll("young", 10);
        consumer.shutdown();
        Interop.ok("from the first offset: everything");
    }

    private static void instant(long atMs) throws Exception {
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = consumer(inbox, ConsumeFromWhere.CONSUME_FROM_TIMESTAMP);
        consumer.setConsumeTimestamp(new SimpleDateFormat("yyyyMMddHHmmss").format(new Date(atMs)));
        consumer.start();
        inbox.awaitAll("young", 10);
        consumer.shutdown();
        Interop.same(0L, inbox.count("old"), "messages from before the instant");
        Interop.ok("from an instant: what became visible since then");
    }

    private static void last() throws Exception {
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = consumer(inbox, ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        consumer.start();
        // Only when it reads is it known that it has chosen where to begin.
        int[] sent = {0};
        Interop.until("a message sent after the consumer began", () -> {
            producer.send(Interop.message(TOPIC, "new-" + sent[0]++));
            return inbox.count("new") > 0;
        });
        consumer.shutdown();
        Interop.same(inbox.count("new"), inbox.count(""), "messages of which none is from before the consumer");
        Interop.ok("from the last offset: only what came later");
    }

    private static DefaultMQPushConsumer consumer(Inbox inbox, ConsumeFromWhere where) throws Exception {
        DefaultMQPushConsumer consumer = Interop.consumer("begin-" + where, TOPIC, "*");
        consumer.setConsumeFromWhere(where);
        consumer.registerMessageListener(inbox);
        return consumer;
    }
}
