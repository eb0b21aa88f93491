import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/** Messages that a consumer could not handle: tried again later, then dead letters. Levels 3, 4, 5 must be 1 s, 2 s, 3 s. */
final class Retries {
    private static final String TOPIC = "retries";
    private static final long PROMPT_MS = 10_000; // RocketMQ takes 41.6 s for the first retry of a new group

    private static DefaultMQProducer producer;

    /** Decides about one attempt, and may say in the context when it is tried again. */
    interface Verdict {
        ConsumeConcurrentlyStatus of(MessageExt message, ConsumeConcurrentlyContext context);
    }

    public static void main(String[] arguments) {
        Interop.run(arguments, Retries::tell);
    }

    private static void tell() throws Exception {
        producer = Interop.producer("retries-producer");
        firstOfNewGroup();
        growingLevels();
        exception();
        deadLetter();
        deadLetterAtOnce();
        sentBack();
        orderlyDeadLetter();
        producer.shutdown();
    }

    // -- again ------------------------------------------------------------------------------------------------------

    private static void firstOfNewGroup() throws Exception {
        Inbox inbox = new Inbox();
        SendResult sent = sent("first");
        DefaultMQPushConsumer consumer = consumer("first", inbox, (message, context) -> {
            context.setDelayLevelWhenNextConsume(1);
            return message.getReconsumeTimes() > 0 ? success() : later();
        });
        Interop.until("the first retry of a new group", () -> inbox.all().size() >= 2);
        Inbox.Arrival again = inbox.all().get(1);
        long gapMs = again.atMs - inbox.all().get(0).atMs;
        Interop.check(gapMs >= 1_000, "the retry of level 1 came after " + gapMs + " ms, which is too early");
        Interop.check(gapMs < PROMPT_MS, "the first retry of a new group came only after " + gapMs + " ms");
        Interop.same("retries-first", again.message.getTopic(), "the topic of the retry");
        Interop.same("first", again.text, "the text of the retry");
        Interop.same(sent.getMsgId(), again.message.getMsgId(), "the id of the retry");
        Interop.same(1, again.message.getReconsumeTimes(), "how often it was tried before");
        consumer.shutdown();
        Interop.ok("the first retry of a new group, of level 1 (1 s), came after " + gapMs + " ms");
    }

    private static void growingLevels() throws Exception {
        Inbox inbox = new Inbox();
        sent("growing");
        DefaultMQPushConsumer consumer = consumer(
                "growing", inbox, (message, context) -> message.getReconsumeTimes() > 2 ? success() : later());
        Interop.until("three retries", () -> inbox.all().size() >= 4);
        List<Inbox.Arrival> arrivals = inbox.all();
        StringBuilder gaps = new StringBuilder();
        for (int i = 1; i <= 3; i++) {
            Inbox.Arrival again = arrivals.get(i);
            long gapMs = again.atMs - arrivals.get(i - 1).atMs;
            Interop.same(i, again.message.getReconsumeTimes(), "how often it was tried before");
            Interop.check(gapMs >= 1_000L * i, "retry " + i + " came after " + gapMs + " ms, which is too early");
            Interop.same(2 + i, again.message.getDelayTimeLevel(), "the level of retry " + i);
            gaps.append(gaps.length() > 0 ? ", " : "").append(gapMs);
        }
        consumer.shutdown();
        Interop.ok("retries of growing level (3, 4, 5: 1, 2, 3 s) came after " + gaps + " ms");
    }

    private static void exception() throws Exception {
        Inbox inbox = new Inbox();
        sent("exception");
        DefaultMQPushConsumer consumer = consumer("exception", inbox, (message, context) -> {
            context.setDelayLevelWhenNextConsume(1);
            if (message.getReconsumeTimes() == 0) {
                throw new IllegalStateException("the listener's own fault");
            }
            return success();
        });
        Interop.until("the retry after an exception", () -> inbox.all().size() >= 2);
        consumer.shutdown();
        Interop.ok("an exception of the listener makes a retry");
    }

    /** The consumer's own call, outside of a listener. */
    private static void sentBack() throws Exception {
        Inbox inbox = new Inbox();
        sent("back");
        DefaultMQPushConsumer consumer = consumer("back", inbox, (message, context) -> success());
        Inbox.Arrival first = inbox.await("back");
        consumer.sendMessageBack(first.message, 1);
        Interop.until("the message that was sent back", () -> inbox.all().size() >= 2);
        consumer.shutdown();
        Interop.ok("a message that the consumer sends back by itself comes again");
    }

    // -- no more ----------------------------------------------------------------------------------------------------

    private static void deadLetter() throws Exception {
        Inbox inbox = new Inbox();
        SendResult sent = sent("dead");
        DefaultMQPushConsumer consumer = configured("dead", 2);
        consumer.registerMessageListener(listener(inbox, (message, context) -> {
            context.setDelayLevelWhenNextConsume(1);
            return later();
        }));
        consumer.start();
        MessageExt letter = awaitDeadLetter("dead");
        Interop.same(3, inbox.all().size(), "attempts with two retries allowed");
        Interop.same("retries-dead", letter.getProperty(MessageConst.PROPERTY_RETRY_TOPIC), "where it was sent to");
        Interop.same(sent.getMsgId(), letter.getMsgId(), "the id of the dead letter");
        consumer.shutdown();
        Interop.ok("after two retries a message is a dead letter and is consumed from %DLQ%");
    }

    private static void deadLetterAtOnce() throws Exception {
        Inbox inbox = new Inbox();
        sent("hopeless");
        DefaultMQPushConsumer consumer = consumer("hopeless", inbox, (message, context) -> {
            context.setDelayLevelWhenNextConsume(-1);
            return later();
        });
        awaitDeadLetter("hopeless");
        Interop.same(1, inbox.all().size(), "attempts of a hopeless message");
        consumer.shutdown();
        Interop.ok("a message refused with level -1 is a dead letter at once");
    }

    /** An orderly consumer tries again by itself; past the limit it sends the message as a new one to %RETRY%. */
    private static void orderlyDeadLetter() throws Exception {
        Inbox inbox = new Inbox();
        sent("orderly");
        DefaultMQPushConsumer consumer = configured("orderly", 2);
        consumer.setSuspendCurrentQueueTimeMillis(100);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            inbox.add(messages);
            return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
        });
        consumer.start();
        awaitDeadLetter("orderly");
        Interop.same(3, inbox.all().size(), "attempts of an orderly consumer with two retries allowed");
        consumer.shutdown();
        Interop.ok("an orderly consumer's message is a dead letter after two retries");
    }

    private static MessageExt awaitDeadLetter(String name) throws Exception {
        return Interop.deadLetter(producer, group(name), name);
    }

    // -- parts ------------------------------------------------------------------------------------------------------

    private static String group(String name) {
        return "retries-" + name + "-group";
    }

    private static SendResult sent(String name) throws Exception {
        return producer.send(Interop.message(TOPIC + "-" + name, name));
    }

    private static DefaultMQPushConsumer configured(String name, int retries) throws Exception {
        DefaultMQPushConsumer consumer = Interop.consumer(group(name), TOPIC + "-" + name, "*");
        consumer.setMaxReconsumeTimes(retries);
        return consumer;
    }

    private static DefaultMQPushConsumer consumer(String name, Inbox inbox, Verdict verdict) throws Exception {
        DefaultMQPushConsumer consumer = configured(name, 16);
        consumer.registerMessageListener(listener(inbox, verdict));
        consumer.start();
        return consumer;
    }

    private static MessageListenerConcurrently listener(
            Inbox inbox, Verdict verdict) {
        return (messages, context) -> {
            inbox.add(messages);
            return verdict.of(messages.get(0), context);
        };
    }

    private static ConsumeConcurrentlyStatus later() {
        return ConsumeConcurrentlyStatus.RECONSUME_LATER;
    }

    private static ConsumeConcurrentlyStatus success() {
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }
}
