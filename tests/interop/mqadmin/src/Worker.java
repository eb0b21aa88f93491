import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Somebody for an operator to look at: a consumer of the group "workers" and a producer of the group "senders", both of
 * the topic "orders". It says what it sends and gets, and goes when its input ends.
 */
final class Worker {
    private Worker() {}

    public static void main(String[] arguments) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("workers");
        consumer.setNamesrvAddr(arguments[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe("orders", "paid || late");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                say("got " + new String(message.getBody(), StandardCharsets.UTF_8));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        DefaultMQProducer producer = new DefaultMQProducer("senders");
        producer.setNamesrvAddr(arguments[0]);
        producer.start();
        send(producer, "first", "paid", 0);
        send(producer, "second", "paid", 0);
        send(producer, "tomorrow", "late", 24 * 60 * 60 * 1_000L);
        say("ready");
        while (System.in.read() >= 0) {
            continue;
        }
        producer.shutdown();
        consumer.shutdown();
    }

    private static void send(DefaultMQProducer producer, String text, String tag, long delayMs) throws Exception {
        Message message = new Message("orders", tag, "key-" + text, text.getBytes(StandardCharsets.UTF_8));
        if (delayMs > 0) {
            message.setDelayTimeMs(delayMs);
        }
        SendResult sent = producer.send(message);
        String place = sent.getMessageQueue().getQueueId() + " " + sent.getQueueOffset();
        say("sent " + text + " " + sent.getMsgId() + " " + sent.getOffsetMsgId() + " " + place);
    }

    private static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
