import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * A broker that is killed and started again under a producer and a consumer. Whoever runs this program kills the broker
 * when it prints "restart please", starts it again on the same ports and folder, and writes a line to its input.
 */
final class Restart {
    private static final String TOPIC = "restart";
    private static final int RESTARTS = 2;
    private static final int BETWEEN = 100; // acknowledged messages between two restarts

    private static DefaultMQProducer producer;
    private static final Inbox inbox = new Inbox();
    private static final Map<String, Long> earliestMs = new ConcurrentHashMap<>(); // of acknowledged messages, by text
    private static final Set<String> cancelled = ConcurrentHashMap.newKeySet();
    private static final AtomicInteger failures = new AtomicInteger();
    private static volatile boolean ended;

    public static void main(String[] arguments) {
        Interop.run(arguments, Restart::tell);
    }

    private static void tell() throws Exception {
        producer = Interop.producer("restart-producer");
        Interop.createTopic(producer, TOPIC, 4);
        DefaultMQPushConsumer consumer = Interop.consumer("restart-consumer", TOPIC, "*");
        consumer.registerMessageListener(inbox);
        consumer.start();
        Thread sending = new Thread(Restart::sendUntilEnded);
        sending.start();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (int i = 1; i <= RESTARTS; i++) {
            restart(i, input);
        }
        ended = true;
        sending.join();
        judge();
        consumer.shutdown();
        producer.shutdown();
    }

    private static void restart(int number, BufferedReader input) throws Exception {
        int enough = earliestMs.size() + BETWEEN;
        Interop.until("messages before restart " + number, () -> earliestMs.size() >= enough && !inbox.all().isEmpty());
        String doomed = "cancelled-" + number;
        Message message = Interop.message(TOPIC, doomed);
        message.setDelayTimeMs(4_000);
        SendResult result = producer.send(message);
        producer.recallMessage(TOPIC, result.getRecallHandle());
        cancelled.add(doomed);
        Message kept = Interop.message(TOPIC, "handle-" + number);
        kept.setDelayTimeSec(600);
        String handle = producer.send(kept).getRecallHandle();

        System.out.println("restart please");
        Interop.check(input.readLine() != null, "nobody restarts the broker");
        long upAtMs = System.currentTimeMillis();
        int before = inbox.all().size();
        Interop.until("the consumer reads again", () -> inbox.all().size() > before + 10);
        long readMs = System.currentTimeMillis() - upAtMs;
        recallAfterwards(handle);
        Interop.ok("restart " + number + ": the consumer reads again " + readMs + " ms after the broker is up");
    }

    /** A handle from before the restart still counts. */
    private static void recallAfterwards(String handle) throws Exception {
        Interop.until("a recall after the restart", () -> {
            try {
                producer.recallMessage(TOPIC, handle);
                return true;
            } catch (org.apache.rocketmq.remoting.exception.RemotingException notYet) {
                return false;
            }
        });
    }

    /** One after the other: at once, or up to five seconds later, so that some are due while the broker is down. */
    private static void sendUntilEnded() {
        for (int i = 0; !ended; i++) {
            String text = "kept-" + i;
            Message message = Interop.message(TOPIC, text);
            long delayMs = i % 2 == 0 ? 0 : 50 * (i % 100);
            if (delayMs > 0) {
                message.setDelayTimeMs(delayMs);
            }
            long dueMs = System.currentTimeMillis() + delayMs;
            try {
                SendResult result = producer.send(message);
                if (result.getSendStatus() == SendStatus.SEND_OK) {
                    earliestMs.put(text, dueMs);
                }
                Thread.sleep(5);
            } catch (Exception expected) {
                failures.incrementAndGet();
            }
        }
    }

    private static void judge() throws Exception {
        Interop.until("all " + earliestMs.size() + " acknowledged messages", () -> {
            Set<String> missing = ConcurrentHashMap.newKeySet();
            missing.addAll(earliestMs.keySet());
            inbox.all().forEach(arrival -> missing.remove(arrival.text));
            return missing.isEmpty();
        });
        for (Inbox.Arrival arrival : inbox.all()) {
            Long dueMs = earliestMs.get(arrival.text);
            Interop.check(
                    dueMs == null || arrival.atMs >= dueMs,
                    arrival.text + " arrived before it was due, after a restart");
            Interop.check(!cancelled.contains(arrival.text), arrival.text + " arrived although its recall was answered");
        }
        int again = inbox.all().size() - (int) inbox.count("");
        Interop.ok(earliestMs.size() + " acknowledged messages arrived, none early, none lost; " + again
                + " came twice, " + failures + " sends failed while the broker was down");
        Interop.ok("recalled messages stayed away, and handles from before a restart still recall");
    }
}
