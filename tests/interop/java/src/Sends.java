import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Every way to send, and what comes out at a push consumer. The argument after the route makes its names its own. */
final class Sends {
    private static String topic;
    private static DefaultMQProducer producer;
    private static final Inbox inbox = new Inbox();

    public static void main(String[] arguments) {
        topic = "sends-" + arguments[1];
        Interop.run(arguments, Sends::tell);
    }

    private static void tell() throws Exception {
        producer = Interop.producer(topic + "-producer");
        sendSync(); // makes the topic
        DefaultMQPushConsumer consumer = Interop.consumer(topic + "-consumer", topic, "*");
        consumer.registerMessageListener(inbox);
        consumer.start();

        sendAsync();
        sendOneway();
        sendBatch();
        sendToOneQueue();
        inbox.awaitAll("sync", 10);
        Interop.ok("ten messages sent one by one arrived; the first send made the topic");
        inbox.awaitAll("async", 20);
        Interop.ok("twenty messages sent without waiting were answered and arrived");
        inbox.awaitAll("oneway", 20);
        Interop.ok("twenty messages sent oneway arrived");
        inbox.awaitAll("batch", 10);
        Interop.ok("a batch of ten arrived");
        checkOneQueue();
        keepEverything();
        compress();
        view();
        refuseTooLarge();
        sendTransaction();
        inbox.checkPlaces();
        consumer.shutdown();
        producer.shutdown();
    }

    // -- ways to send -----------------------------------------------------------------------------------------------

    private static void sendSync() throws Exception {
        for (Message message : Interop.messages(topic, "sync", 10)) {
            SendResult result = producer.send(message);
            Interop.same(SendStatus.SEND_OK, result.getSendStatus(), "the status of a send");
            Interop.same(32, result.getOffsetMsgId().length(), "characters of the id " + result.getOffsetMsgId());
            Interop.check(result.getRecallHandle() == null, "a message without delay has a recall handle");
        }
    }

    private static void sendAsync() throws Exception {
        List<Message> messages = Interop.messages(topic, "async", 20);
        CountDownLatch answered = new CountDownLatch(messages.size());
        AtomicReference<Throwable> failure = new AtomicReference<>();
        for (Message message : messages) {
            producer.send(message, new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    answered.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    failure.set(error);
                    answered.countDown();
                }
            });
        }
        Interop.check(answered.await(Interop.LIMIT_MS, TimeUnit.MILLISECONDS), "async sends were not answered");
        Interop.check(failure.get() == null, "an async send failed: " + failure.get());
    }

    private static void sendOneway() throws Exception {
        for (Message message : Interop.messages(topic, "oneway", 20)) {
            producer.sendOneway(message);
        }
    }

    private static void sendBatch() throws Exception {
        SendResult result = producer.send(Interop.messages(topic, "batch", 10));
        Interop.same(10, result.getMsgId().split(",").length, "ids of a batch of ten: " + result.getMsgId());
        Interop.same(10, result.getOffsetMsgId().split(",").length, "places of a batch of ten");
    }

    private static void sendToOneQueue() throws Exception {
        for (Message message : Interop.messages(topic, "chosen", 10)) {
            producer.send(message, (queues, message_, number) -> queues.get((Integer) number), 2);
        }
    }

    private static void checkOneQueue() throws Exception {
        inbox.awaitAll("chosen", 10);
        long before = -1;
        for (int i = 0; i < 10; i++) {
            MessageExt message = inbox.await("chosen-" + i).message;
            Interop.same(2, message.getQueueId(), "the queue of chosen-" + i);
            Interop.check(message.getQueueOffset() > before, "chosen-" + i + " lies before the one sent before it");
            before = message.getQueueOffset();
        }
        Interop.ok("ten messages for queue 2 lie there in the order they were sent");
    }

    // -- what a message keeps ---------------------------------------------------------------------------------------

    private static void keepEverything() throws Exception {
        Message message = new Message(topic, "red", "key1 key2", 7, "Grüße, 世界".getBytes(StandardCharsets.UTF_8), true);
        message.putUserProperty("colour", "röt");
        long beforeMs = System.currentTimeMillis();
        SendResult result = producer.send(message);
        MessageExt found = inbox.await("Grüße, 世界").message;
        Interop.same("red", found.getTags(), "tags");
        Interop.same("key1 key2", found.getKeys(), "keys");
        Interop.same(7, found.getFlag(), "flag");
        Interop.same("röt", found.getUserProperty("colour"), "a property");
        Interop.same(result.getMsgId(), found.getMsgId(), "the id");
        Interop.same(result.getMessageQueue().getQueueId(), found.getQueueId(), "the queue");
        Interop.same(result.getQueueOffset(), found.getQueueOffset(), "the offset");
        Interop.same(0, found.getReconsumeTimes(), "how often it was tried before");
        Interop.check(found.getBornTimestamp() >= beforeMs - 1, "it was born at " + found.getBornTimestamp());
        Interop.check(found.getStoreTimestamp() >= beforeMs, "it was stored at " + found.getStoreTimestamp());
        Interop.ok("tags, keys, flag, properties, id, queue and offset arrive as they were sent");
    }

    private static void compress() throws Exception {
        for (CompressionType kind : CompressionType.values()) {
            producer.setCompressType(kind);
            String text = kind + " " + "compressible ".repeat(20_000);
            producer.send(Interop.message(topic, text));
            MessageExt found = inbox.await(text).message;
            Interop.check(found.getStoreSize() < 60_000, "260 KB were stored in " + found.getStoreSize() + " bytes");
            Interop.ok("260 KB compressed by " + kind + " to " + found.getStoreSize() + " bytes arrive as they were");
        }
        byte[] noise = Interop.noise(1_000_000);
        producer.send(new Message(topic, "noise", noise));
        Interop.until("a megabyte of noise has not arrived", () -> noiseArrived(noise.length));
        Interop.ok("a megabyte of noise arrives");
    }

    private static boolean noiseArrived(int size) {
        return inbox.all().stream().anyMatch(arrival -> arrival.message.getBody().length == size);
    }

    private static void view() throws Exception {
        SendResult result = producer.send(Interop.message(topic, "viewed"));
        MessageExt found = producer.viewMessage(topic, result.getOffsetMsgId());
        Interop.same("viewed", new String(found.getBody(), StandardCharsets.UTF_8), "the message with that id");
        Interop.same(result.getMsgId(), found.getMsgId(), "its client's id");
        Interop.ok("a message is found by its id " + result.getOffsetMsgId());
        Message timed = Interop.message(topic, "viewed early");
        timed.setDelayTimeSec(3_600);
        result = producer.send(timed);
        found = producer.viewMessage(topic, result.getOffsetMsgId());
        Interop.same("viewed early", new String(found.getBody(), StandardCharsets.UTF_8), "the waiting message");
        Interop.ok("a waiting message is found by its id, too");
        producer.recallMessage(topic, result.getRecallHandle());
    }

    // -- what is refused --------------------------------------------------------------------------------------------

    private static void refuseTooLarge() {
        producer.setMaxMessageSize(8 << 20); // or the client itself refuses it
        Message message = new Message(topic, Interop.noise(5 << 20));
        Interop.refusedWith(13, "a message of 5 MiB", () -> producer.send(message));
    }

    private static void sendTransaction() throws Exception {
        AtomicInteger executed = new AtomicInteger();
        TransactionMQProducer transactions = new TransactionMQProducer(topic + "-transactions", Interop.signing());
        transactions.setNamesrvAddr(Interop.route);
        transactions.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                executed.incrementAndGet();
                return LocalTransactionState.COMMIT_MESSAGE;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        transactions.start();
        Message half = Interop.message(topic, "half");
        SendResult sent = transactions.sendMessageInTransaction(half, null);
        Interop.same(SendStatus.SEND_OK, sent.getSendStatus(), "the answer to the half of a transaction");
        inbox.await("half");
        transactions.shutdown();
        Interop.same(1, executed.get(), "local transactions that were executed");
        Interop.ok("a transaction that was committed at once arrived");
    }
}
