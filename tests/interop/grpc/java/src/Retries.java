import java.util.List;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;

/** A listener that fails: the group's policy says when a message comes again (after 1 s, after 2 s) and how often. */
final class Retries {
    private static final String TOPIC = "retries";
    private static final String GROUP = "retries-push";

    private Retries() {}

    static void tell() throws Exception {
        Inbox inbox = new Inbox();
        Clients.push(GROUP, TOPIC, "*", inbox, message -> {
            boolean isDone = Clients.text(message).equals("hard work") && message.getDeliveryAttempt() == 3;
            return isDone ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
        });
        try (Producer producer = Clients.producer(TOPIC)) {
            producer.send(Clients.message(TOPIC, "hard work").setKeys("order-7").build());
            SendReceipt hopeless = producer.send(Clients.message(TOPIC, "hopeless").setKeys("order-8").build());
            List<Inbox.Arrival> arrivals = awaitAttempts(inbox, "hard work");
            long firstMs = arrivals.get(1).atMs - arrivals.get(0).atMs;
            long secondMs = arrivals.get(2).atMs - arrivals.get(1).atMs;
            Checks.check(firstMs >= 1_000 && secondMs >= 2_000, "it came again after " + firstMs + " and " + secondMs + " ms");
            Checks.ok("a message that failed twice came again after " + firstMs + " and " + secondMs + " ms");
            awaitAttempts(inbox, "hopeless");
            MessageView letter = Clients.deadLetter(GROUP);
            Checks.same("hopeless", Clients.text(letter), "the dead letter");
            Checks.same(List.of("order-8"), List.copyOf(letter.getKeys()), "its keys");
            Checks.same(hopeless.getMessageId().toString(), letter.getMessageId().toString(), "its id");
            Checks.same(6, inbox.all().size(), "attempts of two messages");
            Checks.ok("after three attempts a message is a dead letter, received from %DLQ%" + GROUP);
        }
    }

    private static List<Inbox.Arrival> awaitAttempts(Inbox inbox, String text) throws Exception {
        Checks.until("three attempts of " + text, () -> inbox.of(text).size() == 3);
        List<Inbox.Arrival> arrivals = inbox.of(text);
        for (int i = 0; i < 3; i++) {
            Checks.same(i + 1, arrivals.get(i).message.getDeliveryAttempt(), "the attempt of " + text);
        }
        return arrivals;
    }
}
