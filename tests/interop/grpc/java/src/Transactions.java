import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** Transactions that end, and others about which the broker has to ask. */
final class Transactions {
    private static final String TOPIC = "transactions";

    private Transactions() {}

    static void tell() throws Exception {
        Inbox inbox = new Inbox();
        Set<String> asked = ConcurrentHashMap.newKeySet();
        Clients.push("transactions-push", TOPIC, "*", inbox, message -> ConsumeResult.SUCCESS);
        try (Producer producer = Clients.producer(TOPIC, message -> {
            String text = Clients.text(message);
            boolean isFirst = asked.add(text);
            if (text.equals("asked twice") && isFirst) {
                return TransactionResolution.UNKNOWN;
            }
            return text.startsWith("asked") ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
        })) {
            half(producer, "forgotten");
            half(producer, "asked once");
            half(producer, "asked twice");
            half(producer, "rolled back").rollback();
            half(producer, "committed").commit();
            Checks.until("the committed message", () -> !inbox.of("committed").isEmpty());
            Checks.ok("a committed message arrived");
            Checks.until("the broker asks about all three", () -> asked.size() == 3);
            inbox.await(3, "messages of transactions");
            Checks.same(Set.of("committed", "asked once", "asked twice"), inbox.byText().keySet(), "messages that arrived");
            Checks.same(Set.of("forgotten", "asked once", "asked twice"), asked, "messages that the broker asked about");
        }
        Checks.ok("the broker asked about open transactions, one of them twice; those rolled back stayed away");
    }

    private static Transaction half(Producer producer, String text) throws Exception {
        Transaction transaction = producer.beginTransaction();
        producer.send(Clients.message(TOPIC, text).build(), transaction);
        return transaction;
    }
}
