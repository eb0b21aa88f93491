import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.producer.Producer;

/** Message groups: each comes in order, past a message that fails once, and past one that always fails. */
final class Order {
    private static final String TOPIC = "order";
    private static final String GROUP = "order-push";
    private static final int EACH = 10;
    private static final int ATTEMPTS = 3; // of the group

    private Order() {}

    static void tell() throws Exception {
        Inbox inbox = new Inbox();
        try (Producer producer = Clients.producer(TOPIC)) {
            for (int i = 0; i < EACH; i++) {
                for (String customer : List.of("anna", "bert", "carl")) {
                    producer.send(Clients.message(TOPIC, customer + "-" + i).setMessageGroup(customer).build());
                }
            }
        }
        Clients.push(GROUP, TOPIC, "*", inbox, message -> {
            String text = Clients.text(message);
            boolean fails = text.equals("carl-4") || (text.equals("bert-4") && inbox.of(text).size() == 1);
            return fails ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
        });
        inbox.await(3 * EACH + 1 + ATTEMPTS - 1, "ordered messages");
        judge(inbox);
        Checks.same("carl-4", Clients.text(Clients.deadLetter(GROUP)), "the dead letter");
        Checks.ok("a message that always fails is a dead letter after " + ATTEMPTS + " attempts, then its followers come");
    }

    private static void judge(Inbox inbox) {
        Map<String, Integer> latest = new HashMap<>();
        for (Inbox.Arrival arrival : inbox.all()) {
            String customer = arrival.text.split("-")[0];
            int number = Integer.parseInt(arrival.text.split("-")[1]);
            int before = latest.getOrDefault(customer, -1);
            boolean isAgain = number == before && number == 4;
            Checks.check(isAgain || number == before + 1, arrival.text + " came after " + customer + "-" + before);
            Checks.same(Optional.of(customer), arrival.message.getMessageGroup(), "the message group of " + arrival.text);
            latest.put(customer, number);
        }
        Checks.same(2, inbox.of("bert-4").size(), "attempts of the message that fails once");
        Checks.same(ATTEMPTS, inbox.of("carl-4").size(), "attempts of the message that always fails");
        Checks.ok("three message groups came in order, one of their messages again before its followers");
    }
}
