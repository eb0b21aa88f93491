import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.producer.RecallMessageHandle;

/**
 * Messages that wait so long that they pass through Spark. Arguments after the route: the delay in seconds, and how many.
 *
 * <p>The last line that it prints is JSON, for the test that runs it: tests/test_full_java.py. It takes minutes, so it is
 * none of the programs of scripts/interop.
 */
final class ThroughSpark {
    private static final String TOPIC = "through-spark";
    private static final long SPREAD_MS = 5_000; // between the first send and the last

    private static final Inbox inbox = new Inbox();
    private static final Map<String, Long> dueMs = new LinkedHashMap<>(); // by text

    public static void main(String[] arguments) {
        long delayMs = Long.parseLong(arguments[1]) * 1_000;
        int count = Integer.parseInt(arguments[2]);
        Interop.run(arguments, () -> tell(delayMs, count));
    }

    private static void tell(long delayMs, int count) throws Exception {
        DefaultMQProducer producer = Interop.producer("spark-producer");
        Interop.createTopic(producer, TOPIC, 4);
        DefaultMQPushConsumer consumer = Interop.consumer("spark-consumer", TOPIC, "*");
        consumer.registerMessageListener(inbox);
        consumer.start();
        for (Message message : Interop.messages(TOPIC, "far", count)) {
            send(producer, message, delayMs);
            Thread.sleep(SPREAD_MS / count);
        }
        Thread.sleep(delayMs);
        inbox.awaitAll("far", count);
        inbox.checkPlaces();
        report();
        consumer.shutdown();
        producer.shutdown();
    }

    /** When it is due stands in its handle: by the broker's clock, which is that of this machine. */
    private static void send(DefaultMQProducer producer, Message message, long delayMs) throws Exception {
        message.setDelayTimeMs(delayMs);
        long beganMs = System.currentTimeMillis();
        String handle = producer.send(message).getRecallHandle();
        long at = Long.parseLong(((RecallMessageHandle.HandleV1) RecallMessageHandle.decodeHandle(handle)).getTimestampStr());
        Interop.check(at >= beganMs + delayMs, "it is due " + (beganMs + delayMs - at) + " ms before its delay is over");
        Interop.check(at <= System.currentTimeMillis() + delayMs, "it is due later than its delay after it was sent");
        dueMs.put(new String(message.getBody()), at);
    }

    private static void report() {
        List<Long> shown = new ArrayList<>();
        List<Long> received = new ArrayList<>();
        for (Inbox.Arrival arrival : inbox.all()) {
            shown.add(arrival.message.getStoreTimestamp() - dueMs.get(arrival.text));
            received.add(arrival.atMs - dueMs.get(arrival.text));
        }
        Collections.sort(shown);
        Collections.sort(received);
        System.out.printf(
                "{\"sent\": %d, \"received\": %d, \"last_due\": %d, \"shown_ms\": %s, \"received_ms\": %s}%n",
                dueMs.size(), received.size(), Collections.max(dueMs.values()), summary(shown), summary(received));
    }

    /** Of the lateness of messages, in order: that of the earliest, of the middle one, of the latest. */
    private static String summary(List<Long> latenessMs) {
        int last = latenessMs.size() - 1;
        return String.format(
                "{\"earliest\": %d, \"p50\": %d, \"latest\": %d}",
                latenessMs.get(0), latenessMs.get(last / 2), latenessMs.get(last));
    }
}
