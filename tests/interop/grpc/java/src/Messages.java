import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;

/** Sends without delay; a push consumer of some tags, and a simple consumer of all. */
final class Messages {
    private static final String TOPIC = "messages";
    private static final int COUNT = 20; // of each way to send

    private Messages() {}

    static void tell() throws Exception {
        Inbox inbox = new Inbox();
        Clients.push("messages-push", TOPIC, "a || c", inbox, message -> ConsumeResult.SUCCESS);
        try (Producer producer = Clients.producer(TOPIC);
                SimpleConsumer simple = Clients.simple("messages-simple", TOPIC)) {
            Map<String, String> ids = sent(producer);
            received(simple, ids);
            filtered(inbox);
            again(producer, simple);
        }
        if (Clients.USER != null) {
            Checks.refusedWith(40100, "a wrong secret", () -> Clients.producerWithSecret(TOPIC, "another").close());
        }
    }

    /** The ids by text. */
    private static Map<String, String> sent(Producer producer) throws Exception {
        Map<String, String> ids = new HashMap<>();
        for (int i = 0; i < COUNT; i++) {
            ids.put("sync-" + i, producer.send(message("sync-" + i, i)).getMessageId().toString());
        }
        List<CompletableFuture<SendReceipt>> answers = new ArrayList<>();
        for (int i = 0; i < COUNT; i++) {
            answers.add(producer.sendAsync(message("async-" + i, i)));
        }
        for (int i = 0; i < COUNT; i++) {
            ids.put("async-" + i, answers.get(i).get().getMessageId().toString());
        }
        return ids;
    }

    private static Message message(String text, int number) {
        return Clients.message(TOPIC, text)
                .setTag(tag(number))
                .setKeys("key-" + text, "grün")
                .addProperty("colour", "rötlich")
                .build();
    }

    private static String tag(int number) {
        return String.valueOf("abcd".charAt(number % 4));
    }

    private static void received(SimpleConsumer simple, Map<String, String> ids) throws Exception {
        Map<String, MessageView> found = new HashMap<>();
        for (MessageView message : Clients.receive(simple, 2 * COUNT)) {
            String text = Clients.text(message);
            int number = Integer.parseInt(text.split("-")[1]);
            Checks.same(ids.get(text), message.getMessageId().toString(), "the id of " + text);
            Checks.same(TOPIC, message.getTopic(), "the topic of " + text);
            Checks.same(Optional.of(tag(number)), message.getTag(), "the tag of " + text);
            Checks.same(List.of("key-" + text, "grün"), List.copyOf(message.getKeys()), "the keys of " + text);
            Checks.same(Map.of("colour", "rötlich"), message.getProperties(), "the properties of " + text);
            Checks.same(1, message.getDeliveryAttempt(), "the attempt of " + text);
            simple.ack(message);
            found.put(text, message);
        }
        Checks.same(ids.keySet(), found.keySet(), "messages received");
        Checks.ok(2 * COUNT + " messages, half of them sent asynchronously, arrived once each, with id, body, tag, keys"
                + " and property, and were acknowledged");
    }

    private static void filtered(Inbox inbox) throws Exception {
        for (Inbox.Arrival arrival : inbox.await(COUNT, "messages of two tags")) {
            String tag = arrival.message.getTag().orElse("");
            Checks.check(tag.equals("a") || tag.equals("c"), "a message with tag " + tag + " arrived");
        }
        Checks.ok("a push consumer of a || c gets those tags and no others");
    }

    private static void again(Producer producer, SimpleConsumer simple) throws Exception {
        producer.send(Clients.message(TOPIC, "again").build());
        MessageView first = Clients.receive(simple, 1).get(0);
        simple.changeInvisibleDuration(first, Duration.ofSeconds(1));
        MessageView second = Clients.receive(simple, 1).get(0);
        Checks.same(first.getMessageId(), second.getMessageId(), "the message that came again");
        Checks.same(2, second.getDeliveryAttempt(), "its attempt");
        Checks.refusedWith(40013, "an expired handle", () -> simple.ack(first));
        simple.ack(second);
        Checks.ok("a message comes again after the invisible time that its consumer asked for");
    }
}
