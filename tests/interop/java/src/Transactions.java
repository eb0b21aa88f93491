import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Transactions: commit, rollback, unknown ones that the broker asks about, and a broker that is killed in between.
 * Whoever runs this program restarts the broker when it prints "restart please", and writes a line to its input.
 */
final class Transactions implements TransactionListener {
    private static final String TOPIC = "transactions", GROUP = "transaction-producer";
    private static final long DELAY_MS = 2_000;

    private static final Transactions listener = new Transactions();
    private static final Inbox inbox = new Inbox();
    private static TransactionMQProducer producer;

    /** What the listener says, by text; a text that is not there is not known yet. */
    private final Map<String, LocalTransactionState> first = new ConcurrentHashMap<>(), later = new ConcurrentHashMap<>();
    private final Map<String, AtomicInteger> asked = new ConcurrentHashMap<>();

    public static void main(String[] arguments) {
        Interop.run(arguments, Transactions::tell);
    }

    private static void tell() throws Exception {
        DefaultMQProducer plain = Interop.producer("plain-producer");
        Interop.createTopic(plain, TOPIC, 2);
        producer = new TransactionMQProducer(GROUP, Interop.signing());
        producer.setNamesrvAddr(Interop.route);
        producer.setInstanceName("transactions");
        producer.setSendMsgTimeout(10_000);
        producer.setTransactionListener(listener);
        producer.start();
        DefaultMQPushConsumer consumer = Interop.consumer("transaction-consumer", TOPIC, "*");
        consumer.registerMessageListener(inbox);
        consumer.start();

        commits();
        rollsBack();
        isAsked();
        isAskedAgain();
        delays();
        survives(plain, new BufferedReader(new InputStreamReader(System.in)));
        judge();
        consumer.shutdown();
        producer.shutdown();
        plain.shutdown();
    }

    // -- what the listener says -------------------------------------------------------------------------------------

    @Override
    public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
        return first.getOrDefault(text(message), LocalTransactionState.UNKNOW);
    }

    @Override
    public LocalTransactionState checkLocalTransaction(MessageExt message) {
        asked.computeIfAbsent(text(message), each -> new AtomicInteger()).incrementAndGet();
        return later.getOrDefault(text(message), LocalTransactionState.UNKNOW);
    }

    private static String text(Message message) {
        return new String(message.getBody(), java.nio.charset.StandardCharsets.UTF_8);
    }

    private static int askedAbout(String text) {
        AtomicInteger count = listener.asked.get(text);
        return count == null ? 0 : count.get();
    }

    private static TransactionSendResult send(Message message) throws Exception {
        TransactionSendResult result = producer.sendMessageInTransaction(message, null);
        Interop.same(SendStatus.SEND_OK, result.getSendStatus(), "the status of " + text(message));
        Interop.same(result.getMsgId(), result.getTransactionId(), "the id of the transaction");
        return result;
    }

    private static TransactionSendResult send(String text, LocalTransactionState state) throws Exception {
        listener.first.put(text, state);
        return send(Interop.message(TOPIC, text));
    }

    // -- the story --------------------------------------------------------------------------------------------------

    private static void commits() throws Exception {
        TransactionSendResult result = send("committed", LocalTransactionState.COMMIT_MESSAGE);
        MessageExt message = inbox.await("committed").message;
        Interop.same(result.getTransactionId(), message.getProperty("__transactionId__"), "its transaction");
        Interop.same(result.getMsgId(), message.getMsgId(), "the id of a delivered message");
        Interop.same(8, message.getSysFlag() & 12, "the bits of a transaction");
        Interop.same(GROUP, message.getProperty(MessageConst.PROPERTY_PRODUCER_GROUP), "its producer group");
        Interop.check(
                message.getProperty(MessageConst.PROPERTY_TRANSACTION_PREPARED) == null, "it still says that it is a half");
        Interop.ok("a committed message is delivered, with the id of its transaction");
    }

    private static void rollsBack() throws Exception {
        send("rolled back", LocalTransactionState.ROLLBACK_MESSAGE);
        Interop.ok("a rollback is taken");
    }

    private static void isAsked() throws Exception {
        listener.later.put("asked, commit", LocalTransactionState.COMMIT_MESSAGE);
        listener.later.put("asked, rolled back", LocalTransactionState.ROLLBACK_MESSAGE);
        send("asked, rolled back", LocalTransactionState.UNKNOW);
        send("asked, commit", LocalTransactionState.UNKNOW);
        MessageExt message = inbox.await("asked, commit").message;
        Interop.same("1", message.getProperty(MessageConst.PROPERTY_TRANSACTION_CHECK_TIMES), "how often it was asked for");
        Interop.until("a check of the other one", () -> askedAbout("asked, rolled back") > 0);
        Interop.ok("unknown transactions are asked about, and end as the listener says");
    }

    private static void isAskedAgain() throws Exception {
        send("asked twice, commit", LocalTransactionState.UNKNOW);
        Interop.until("two checks", () -> askedAbout("asked twice, commit") >= 2);
        Interop.check(!inbox.has("asked twice, commit"), "it was delivered before its listener knew");
        listener.later.put("asked twice, commit", LocalTransactionState.COMMIT_MESSAGE);
        inbox.await("asked twice, commit");
        Interop.ok("a listener that does not know yet is asked again");
    }

    /** The client refuses RocketMQ's own delays here; the name of Alibaba Cloud's clients goes through. */
    private static void delays() throws Exception {
        Message message = Interop.message(TOPIC, "delayed commit");
        long dueMs = System.currentTimeMillis() + DELAY_MS;
        MessageAccessor.putProperty(message, "__STARTDELIVERTIME", Long.toString(dueMs));
        listener.first.put("delayed commit", LocalTransactionState.COMMIT_MESSAGE);
        send(message);
        Interop.check(inbox.await("delayed commit").atMs >= dueMs, "a delayed commit came early");
        Interop.ok("a committed message waits for its due");
    }

    private static void survives(DefaultMQProducer plain, BufferedReader input) throws Exception {
        send("open before the restart, commit", LocalTransactionState.UNKNOW);
        send("committed before the restart", LocalTransactionState.COMMIT_MESSAGE);
        inbox.await("committed before the restart");
        System.out.println("restart please");
        Interop.check(input.readLine() != null, "nobody restarts the broker");
        listener.later.put("open before the restart, commit", LocalTransactionState.COMMIT_MESSAGE);
        inbox.await("open before the restart, commit");
        Interop.until("a transaction after the restart", () -> {
            try {
                send("committed after the restart", LocalTransactionState.COMMIT_MESSAGE);
                return true;
            } catch (org.apache.rocketmq.client.exception.MQClientException notYet) {
                return false;
            }
        });
        inbox.await("committed after the restart");
        Interop.ok("an open transaction survives a kill of its broker, and is asked about afterwards");
        plain.send(Interop.message(TOPIC, "the last one"));
        inbox.await("the last one");
    }

    private static void judge() {
        inbox.checkPlaces();
        for (String text : new String[] {"rolled back", "asked, rolled back"}) {
            Interop.check(!inbox.has(text), text + ": it was delivered");
        }
        Interop.ok("nothing that was rolled back has arrived, and nothing twice");
    }
}
