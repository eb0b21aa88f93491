import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;

/** Messages for later, one of which is recalled. */
final class Delays {
    private static final String TOPIC = "delays";
    private static final long YEAR_MS = 365 * 24 * 3_600_000L;

    private Delays() {}

    static void tell() throws Exception {
        Inbox inbox = new Inbox();
        Map<String, Long> dueMs = new LinkedHashMap<>();
        Clients.push("delays-push", TOPIC, "*", inbox, message -> ConsumeResult.SUCCESS);
        try (Producer producer = Clients.producer(TOPIC)) {
            SendReceipt doomed = producer.send(due("recalled", System.currentTimeMillis() + 2_000));
            for (long delayMs : new long[] {-5_000, 700, 1_234, 2_345, 2_500}) {
                String text = "in " + delayMs + " ms";
                dueMs.put(text, System.currentTimeMillis() + delayMs);
                producer.send(due(text, dueMs.get(text)));
            }
            String recalled = producer.recallMessage(TOPIC, doomed.getRecallHandle()).getMessageId().toString();
            Checks.same(doomed.getMessageId().toString(), recalled, "the id of the recalled message");
            Checks.refusedWith(40012, "a delay of twenty years", () ->
                    producer.send(due("never", System.currentTimeMillis() + 20 * YEAR_MS)));

            inbox.await(dueMs.size(), "delayed messages");
        }
        dueMs.forEach((text, due) -> {
            Inbox.Arrival arrival = inbox.byText().get(text);
            Checks.check(arrival != null, text + " did not arrive");
            Checks.check(arrival.atMs >= due, text + " arrived " + (due - arrival.atMs) + " ms early");
            Checks.ok(text + ": arrived " + (arrival.atMs - due) + " ms after due");
        });
        Checks.ok("a message that was recalled stayed away");
    }

    private static Message due(String text, long atMs) {
        return Clients.message(TOPIC, text).setDeliveryTimestamp(atMs).build();
    }
}
