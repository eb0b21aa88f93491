import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.producer.RecallMessageHandle;

/** Cancelling: by the handle that a send returns, and by RocketMQ's delete marker. */
final class Recall {
    private static final String TOPIC = "recall";
    private static final long DUE_MS = 5_000; // long enough for a cancel to come before it on a slow machine

    private static DefaultMQProducer producer;
    private static final Inbox inbox = new Inbox();

    public static void main(String[] arguments) {
        Interop.run(arguments, Recall::tell);
    }

    private static void tell() throws Exception {
        producer = Interop.producer("recall-producer");
        Interop.createTopic(producer, TOPIC, 1);
        DefaultMQPushConsumer consumer = Interop.consumer("recall-consumer", TOPIC, "*");
        consumer.registerMessageListener(inbox);
        consumer.start();

        recallTimed();
        recallFar();
        recallLevel();
        deleteByMarker();
        waitBeyondDue();
        refuseDelivered();
        refuseSpoilt();
        refuseMarkers();
        consumer.shutdown();
        producer.shutdown();
    }

    // -- what is cancelled ------------------------------------------------------------------------------------------

    private static void recallTimed() throws Exception {
        SendResult result = producer.send(timed("cancelled timed", DUE_MS));
        Interop.same(result.getMsgId(), producer.recallMessage(TOPIC, result.getRecallHandle()), "the recalled id");
        Interop.ok("a timed message is recalled, the answer is its id");
        producer.recallMessage(TOPIC, result.getRecallHandle());
        Interop.ok("so it is when it is recalled again");
    }

    private static void recallFar() throws Exception {
        SendResult result = producer.send(timed("cancelled far", 3_600_000));
        producer.recallMessage(TOPIC, result.getRecallHandle());
        Interop.ok("a message that is due in an hour is recalled");
    }

    private static void recallLevel() throws Exception {
        Message message = Interop.message(TOPIC, "cancelled level");
        message.setDelayTimeLevel(2); // 5 s, or 2 s where levels are short
        SendResult result = producer.send(message);
        producer.recallMessage(TOPIC, result.getRecallHandle());
        Interop.ok("a message of a delay level is recalled");
    }

    private static void deleteByMarker() throws Exception {
        for (String prefix : new String[] {"", TOPIC + "+"}) {
            Message message = timed("cancelled marked", DUE_MS);
            SendResult result = producer.send(message);
            producer.send(marker(prefix + result.getMsgId(), message.getDeliverTimeMs()));
            Interop.ok("a delete marker for " + prefix + "KEY is taken");
        }
    }

    private static void waitBeyondDue() throws Exception {
        producer.send(timed("after all of them", DUE_MS + 500));
        inbox.await("after all of them");
        Interop.same(0L, inbox.count("cancelled"), "cancelled messages that arrived");
        Interop.same(0L, inbox.count("marker"), "delete markers that arrived");
        Interop.ok("nothing that was cancelled has arrived after its due time, nor has a marker");
    }

    // -- what is refused --------------------------------------------------------------------------------------------

    private static void refuseDelivered() throws Exception {
        Message message = Interop.message(TOPIC, "delivered");
        message.setDelayTimeMs(300); // an instant may have passed when it reaches the broker; then there is no handle
        SendResult result = producer.send(message);
        inbox.await("delivered");
        String handle = result.getRecallHandle();
        Interop.refusedWith(604, "the recall of a delivered message", () -> producer.recallMessage(TOPIC, handle));
    }

    private static void refuseSpoilt() throws Exception {
        Message message = Interop.message(TOPIC, "kept");
        message.setDelayTimeMs(1_000);
        SendResult result = producer.send(message);
        var handle = (RecallMessageHandle.HandleV1) RecallMessageHandle.decodeHandle(result.getRecallHandle());
        String key = handle.getMessageId();
        String other = key.substring(0, key.length() - 1) + (key.endsWith("0") ? "1" : "0");
        recallSpoilt("of another key", built(handle, handle.getTimestampStr(), other));
        long dueMs = Long.parseLong(handle.getTimestampStr());
        recallSpoilt("of another due time", built(handle, String.valueOf(dueMs + 777), key));
        try {
            producer.recallMessage(TOPIC, "no handle at all");
            throw new AssertionError("a text that is no handle was taken for one");
        } catch (Exception error) {
            Interop.ok("a text that is no handle is refused: " + error.getMessage());
        }
        inbox.await("kept");
        Interop.ok("the message whose handle was spoilt arrives");
    }

    private static void recallSpoilt(String what, String handle) {
        Interop.refusedWith(604, "a handle " + what, () -> producer.recallMessage(TOPIC, handle));
    }

    private static String built(RecallMessageHandle.HandleV1 handle, String due, String key) {
        return RecallMessageHandle.HandleV1.buildHandle(TOPIC, handle.getBrokerName(), due, key);
    }

    private static void refuseMarkers() {
        Message unknown = marker("0123456789ABCDEF", System.currentTimeMillis() + DUE_MS);
        Interop.refusedWith(604, "a delete marker for an unknown key", () -> producer.send(unknown));
        Message late = marker("0123456789ABCDEF", System.currentTimeMillis() - DUE_MS);
        Interop.refusedWith(13, "a delete marker whose time has passed", () -> producer.send(late));
    }

    // -- messages ---------------------------------------------------------------------------------------------------

    private static Message timed(String text, long delayMs) {
        Message message = Interop.message(TOPIC, text);
        message.setDeliverTimeMs(System.currentTimeMillis() + delayMs);
        return message;
    }

    private static Message marker(String key, long dueMs) {
        Message message = Interop.message(TOPIC, "marker");
        message.setDeliverTimeMs(dueMs);
        MessageAccessor.putProperty(message, MessageConst.PROPERTY_TIMER_DEL_UNIQKEY, key);
        return message;
    }
}
