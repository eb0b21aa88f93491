import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.producer.Producer;

/** A broker that is killed and started again under a producer and a consumer, by the process that reads our output. */
final class Restart {
    private static final String TOPIC = "restart";
    private static final int BEFORE = 100; // acknowledged messages before the restart

    private static final Map<String, Long> dueMs = new ConcurrentHashMap<>(); // of acknowledged messages, by text
    private static final AtomicInteger failures = new AtomicInteger();
    private static volatile boolean ended;

    private Restart() {}

    static void tell() throws Exception {
        Inbox inbox = new Inbox();
        Clients.push("restart-push", TOPIC, "*", inbox, message -> ConsumeResult.SUCCESS);
        // It ends with the process: to close one may take two minutes while it renews its stream to the broker.
        Producer producer = Clients.producer(TOPIC);
        Thread sending = new Thread(() -> sendUntilEnded(producer));
        sending.start();
        restart(inbox);
        ended = true;
        sending.join();
        judge(inbox);
    }

    private static void restart(Inbox inbox) throws Exception {
        Checks.until("messages before the restart", () -> dueMs.size() >= BEFORE && !inbox.all().isEmpty());
        System.out.println("restart please");
        String answer = new BufferedReader(new InputStreamReader(System.in)).readLine();
        Checks.check(answer != null, "nobody restarts the broker");
        long upAtMs = System.currentTimeMillis();
        int before = inbox.all().size();
        Checks.until("the consumer reads again", () -> inbox.all().size() > before + 10);
        Checks.ok("the consumer reads again " + (System.currentTimeMillis() - upAtMs) + " ms after the broker is up");
    }

    /** One after the other: at once, or up to two seconds later, so that some are due while the broker is down. */
    private static void sendUntilEnded(Producer producer) {
        for (int i = 0; !ended; i++) {
            long delayMs = i % 2 == 0 ? 0 : 20 * (i % 100);
            long atMs = System.currentTimeMillis() + delayMs;
            MessageBuilder message = Clients.message(TOPIC, "kept-" + i);
            try {
                producer.send((delayMs > 0 ? message.setDeliveryTimestamp(atMs) : message).build());
                dueMs.put("kept-" + i, atMs);
                Thread.sleep(5);
            } catch (Exception expected) { // some are no ClientException, but of the library below
                failures.incrementAndGet();
            }
        }
    }

    private static void judge(Inbox inbox) throws Exception {
        Checks.until("all " + dueMs.size() + " acknowledged messages", () ->
                inbox.byText().keySet().containsAll(dueMs.keySet()));
        for (Inbox.Arrival arrival : inbox.all()) {
            long atMs = dueMs.getOrDefault(arrival.text, 0L);
            Checks.check(arrival.atMs >= atMs, arrival.text + " arrived before it was due, after a restart");
        }
        int again = inbox.all().size() - inbox.byText().size();
        Checks.ok(dueMs.size() + " acknowledged messages arrived, none early, none lost; " + again + " came twice, "
                + failures + " sends failed while the broker was down");
    }
}
