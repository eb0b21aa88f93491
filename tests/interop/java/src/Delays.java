import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageBatch;
import org.apache.rocketmq.common.message.MessageClientIDSetter;

/** Every way to ask for a delay. The first argument after the route is the delay of level 2 in milliseconds. */
final class Delays {
    private static final String TOPIC = "delays";
    private static final long YEAR_S = 365 * 24 * 3_600L;

    private static DefaultMQProducer producer;
    private static final Inbox inbox = new Inbox();
    private static final Map<String, Long> earliestMs = new LinkedHashMap<>(); // by text

    public static void main(String[] arguments) {
        long level2Ms = Long.parseLong(arguments[1]);
        Interop.run(arguments, () -> tell(level2Ms));
    }

    private static void tell(long level2Ms) throws Exception {
        producer = Interop.producer("delays-producer");
        Interop.createTopic(producer, TOPIC, 4);
        DefaultMQPushConsumer consumer = Interop.consumer("delays-consumer", TOPIC, "*");
        consumer.registerMessageListener(inbox);
        consumer.start();
        producer.send(Interop.message(TOPIC, "hello"));
        inbox.await("hello"); // from here on the consumer is no longer what messages wait for

        sendEveryForm(level2Ms);
        sendBatch();
        sendSpread();
        sendBurst();
        refuseTooFar();

        for (String text : earliestMs.keySet()) {
            inbox.await(text);
        }
        checkForms();
        report("batch");
        report("spread");
        report("burst");
        inbox.checkPlaces();
        Interop.ok("each message has one place in its queue");
        consumer.shutdown();
        producer.shutdown();
    }

    // -- sending ----------------------------------------------------------------------------------------------------

    private static void sendEveryForm(long level2Ms) throws Exception {
        Message level1 = Interop.message(TOPIC, "form: setDelayTimeLevel(1)");
        level1.setDelayTimeLevel(1);
        send(level1, 1_000);
        Message level2 = Interop.message(TOPIC, "form: setDelayTimeLevel(2)");
        level2.setDelayTimeLevel(2);
        send(level2, level2Ms);
        Message seconds = Interop.message(TOPIC, "form: setDelayTimeSec(2)");
        seconds.setDelayTimeSec(2);
        send(seconds, 2_000);
        Message millis = Interop.message(TOPIC, "form: setDelayTimeMs(1234)");
        millis.setDelayTimeMs(1_234);
        send(millis, 1_234);
        Message instant = Interop.message(TOPIC, "form: setDeliverTimeMs(in 2567 ms)");
        instant.setDeliverTimeMs(System.currentTimeMillis() + 2_567);
        earliestMs.put("form: setDeliverTimeMs(in 2567 ms)", instant.getDeliverTimeMs());
        checkHandle(producer.send(instant));
        Message both = Interop.message(TOPIC, "form: a level before all others");
        both.setDelayTimeSec(YEAR_S);
        both.setDelayTimeLevel(1);
        send(both, 1_000);
        Message past = Interop.message(TOPIC, "form: an instant that has passed");
        past.setDeliverTimeMs(System.currentTimeMillis() - 5_000);
        send(past, 0);
        Message none = Interop.message(TOPIC, "form: setDelayTimeMs(0)");
        none.setDelayTimeMs(0);
        send(none, 0);
    }

    private static void send(Message message, long delayMs) throws Exception {
        String text = new String(message.getBody());
        earliestMs.put(text, System.currentTimeMillis() + delayMs);
        SendResult result = producer.send(message);
        if (delayMs > 0) {
            checkHandle(result);
        }
    }

    private static void checkHandle(SendResult result) {
        Interop.check(result.getRecallHandle() != null, "a delayed message came without a recall handle: " + result);
    }

    /** Clients up to 5.3 let delays into a batch; 5.5 asks its members when it is made, and not again. */
    private static void sendBatch() throws Exception {
        List<Message> members = Interop.messages(TOPIC, "batch", 4);
        MessageBatch batch = MessageBatch.generateFromList(members);
        batch.setTopic(TOPIC);
        members.forEach(MessageClientIDSetter::setUniqID);
        long nowMs = System.currentTimeMillis();
        members.get(0).setDelayTimeMs(1_500);
        members.get(1).setDelayTimeSec(2);
        members.get(2).setDeliverTimeMs(nowMs + 2_500);
        batch.setBody(batch.encode());
        producer.send(batch);
        earliestMs.put("batch-0", nowMs + 1_500);
        earliestMs.put("batch-1", nowMs + 2_000);
        earliestMs.put("batch-2", nowMs + 2_500);
        earliestMs.put("batch-3", nowMs);
    }

    private static void sendSpread() throws Exception {
        List<Message> messages = Interop.messages(TOPIC, "spread", 200);
        long firstMs = System.currentTimeMillis() + 2_000;
        for (int i = 0; i < messages.size(); i++) {
            messages.get(i).setDeliverTimeMs(firstMs + 10 * i);
            earliestMs.put("spread-" + i, firstMs + 10 * i);
            producer.send(messages.get(i));
        }
    }

    private static void sendBurst() throws Exception {
        long dueMs = System.currentTimeMillis() + 3_000;
        List<Message> messages = Interop.messages(TOPIC, "burst", 1_000);
        for (Message message : messages) {
            message.setDeliverTimeMs(dueMs);
            earliestMs.put(new String(message.getBody()), dueMs);
        }
        CountDownLatch answered = new CountDownLatch(messages.size());
        for (Message message : messages) {
            producer.send(message, new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    answered.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    error.printStackTrace(); // then the message is missed in the end
                    answered.countDown();
                }
            });
        }
        answered.await();
    }

    private static void refuseTooFar() {
        Message far = Interop.message(TOPIC, "never");
        far.setDelayTimeSec(20 * YEAR_S);
        Interop.refusedWith(13, "a delay of twenty years", () -> producer.send(far));
        Message odd = Interop.message(TOPIC, "never");
        odd.putUserProperty("TIMER_DELAY_MS_", "x"); // a user's own property of a similar name is nobody's business
        odd.getProperties().put("TIMER_DELAY_MS", "soon");
        Interop.refusedWith(13, "a delay that is no number", () -> producer.send(odd));
    }

    // -- judging ----------------------------------------------------------------------------------------------------

    private static void checkForms() throws Exception {
        for (String text : earliestMs.keySet()) {
            if (text.startsWith("form: ")) {
                Inbox.Arrival arrival = inbox.await(text);
                Lateness lateness = new Lateness();
                lateness.add(arrival, earliestMs.get(text));
                Interop.ok(text + ": arrived " + (arrival.atMs - earliestMs.get(text)) + " ms after due");
            }
        }
    }

    private static void report(String prefix) throws Exception {
        Lateness lateness = new Lateness();
        int count = 0;
        for (String text : earliestMs.keySet()) {
            if (text.startsWith(prefix)) {
                lateness.add(inbox.await(text), earliestMs.get(text));
                count++;
            }
        }
        Interop.ok(prefix + ": " + count + " timed messages, none early; " + lateness);
    }
}
