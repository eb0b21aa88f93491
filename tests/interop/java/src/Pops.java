import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.reflect.Field;
import java.util.Arrays;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.impl.consumer.DefaultMQPushConsumerImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * A consumer that leaves it to the broker which queues it reads (clientRebalance=false), and so pops: messages are given,
 * acknowledged one by one, and given again where they are not. Groups may have one retry. Whoever runs this restarts the
 * broker when it says so (see Restart).
 */
final class Pops {
    private static final int PAUSE_S = 3; // until a message is given again; the client's own are 10 s and more

    private static DefaultMQProducer producer;

    public static void main(String[] arguments) {
        Interop.run(arguments, Pops::tell);
    }

    private static void tell() throws Exception {
        producer = Interop.producer("pops-producer");
        everything();
        deadLetterOverRestart();
        producer.shutdown();
    }

    private static void everything() throws Exception {
        String topic = "pops";
        Interop.createTopic(producer, topic, 4);
        Inbox first = new Inbox();
        Inbox second = new Inbox();
        DefaultMQPushConsumer one = started("pops-group", topic, "wanted", first);
        DefaultMQPushConsumer two = started("pops-group", topic, "wanted", second);
        Interop.until("both consumers are given something", () -> {
            producer.send(new Message(topic, "wanted", "hello".getBytes()));
            return first.has("hello") && second.has("hello");
        });
        for (Message message : Interop.messages(topic, "plain", 400)) {
            message.setTags(message.getBody().length % 2 == 0 ? "wanted" : "unwanted");
            producer.send(message);
        }
        long wanted = Interop.messages(topic, "plain", 400).stream()
                .filter(message -> message.getBody().length % 2 == 0).count();
        Interop.until("all wanted messages", () -> first.count("plain") + second.count("plain") >= wanted);
        Interop.same(wanted, first.count("plain") + second.count("plain"), "messages with the tag, each once");
        Interop.ok(wanted + " messages popped once each by two consumers of a group, by tag");
        timed(topic, first, second);
        one.shutdown();
        two.shutdown();
    }

    private static void timed(String topic, Inbox first, Inbox second) throws Exception {
        Message message = Interop.message(topic, "timed");
        message.setTags("wanted");
        long dueMs = System.currentTimeMillis() + 1_500;
        message.setDeliverTimeMs(dueMs);
        producer.send(message);
        Interop.until("the timed message", () -> first.has("timed") || second.has("timed"));
        Inbox.Arrival arrival = (first.has("timed") ? first : second).of("timed").get(0);
        Interop.check(arrival.atMs >= dueMs, "a timed message was popped " + (dueMs - arrival.atMs) + " ms too early");
        Interop.ok("a timed message is popped " + (arrival.atMs - dueMs) + " ms after it is due");
    }

    /** One that fails for ever, one that succeeds at the second attempt; the broker is killed between the attempts. */
    private static void deadLetterOverRestart() throws Exception {
        String topic = "pops-retry";
        String group = "pops-retry-group";
        Interop.createTopic(producer, topic, 1);
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = configured(group, topic, "*");
        hurry(consumer);
        // What a client that has lost its queue in a restart says of a failure gets lost, too: then the lease must end, and
        // the usual one takes as long as we wait.
        consumer.setPopInvisibleTime(20_000);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            inbox.add(messages);
            return succeeds(messages.get(0))
                    ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                    : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        producer.send(Interop.message(topic, "poison"));
        producer.send(Interop.message(topic, "second-time-lucky"));
        inbox.await("poison");
        inbox.await("second-time-lucky");
        Thread.sleep(500); // the client tells the broker about its failures on its own time
        System.out.println("restart please");
        new BufferedReader(new InputStreamReader(System.in)).readLine();
        Interop.until("second attempts", () -> inbox.of("poison").size() >= 2 && inbox.of("second-time-lucky").size() >= 2);
        for (String text : List.of("poison", "second-time-lucky")) {
            List<Inbox.Arrival> arrivals = inbox.of(text);
            long gapMs = arrivals.get(1).atMs - arrivals.get(0).atMs;
            Interop.check(gapMs >= 1_000L * PAUSE_S, text + " was given again after " + gapMs + " ms, which is too early");
            Interop.same(1, arrivals.get(1).message.getReconsumeTimes(), "how often " + text + " was given before");
            Interop.same(arrivals.get(0).message.getQueueOffset(), arrivals.get(1).message.getQueueOffset(), "its place");
            Interop.ok(text + " was given again after " + gapMs + " ms, the broker was killed in between");
        }
        MessageExt letter = Interop.deadLetter(producer, group, "poison");
        Interop.same(topic, letter.getProperty(MessageConst.PROPERTY_RETRY_TOPIC), "where it was sent to");
        Interop.same(2, inbox.of("poison").size(), "attempts of the poison");
        Interop.same(2, inbox.of("second-time-lucky").size(), "attempts of the other");
        consumer.shutdown();
        Interop.ok("after one retry a popped message is a dead letter");
    }

    /** The client has no setting for its pauses. */
    private static void hurry(DefaultMQPushConsumer consumer) throws Exception {
        Field pauses = DefaultMQPushConsumerImpl.class.getDeclaredField("popDelayLevel");
        pauses.setAccessible(true);
        Arrays.fill((int[]) pauses.get(consumer.getDefaultMQPushConsumerImpl()), PAUSE_S);
    }

    private static boolean succeeds(MessageExt message) {
        return new String(message.getBody()).startsWith("second") && message.getReconsumeTimes() > 0;
    }

    private static DefaultMQPushConsumer started(String group, String topic, String tags, Inbox inbox) throws Exception {
        DefaultMQPushConsumer consumer = configured(group, topic, tags);
        consumer.registerMessageListener(inbox);
        consumer.start();
        return consumer;
    }

    private static DefaultMQPushConsumer configured(String group, String topic, String tags) throws Exception {
        DefaultMQPushConsumer consumer = Interop.consumer(group, topic, tags);
        consumer.setClientRebalance(false);
        return consumer;
    }
}
