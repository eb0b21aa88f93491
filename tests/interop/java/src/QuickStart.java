import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/** What README.md shows to a user of the official client: the lines between the marks. */
public final class QuickStart {
    private static final long LIMIT_S = 60;

    public static void main(String[] arguments) throws Exception {
        String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:9876";
        CountDownLatch arrived = new CountDownLatch(2);

        // begin send
        DefaultMQProducer producer = new DefaultMQProducer("shop");
        producer.setNamesrvAddr(address); // "127.0.0.1:9876"
        producer.start();

        Message soon = new Message("orders", "in two seconds".getBytes());
        soon.setDelayTimeSec(2);
        SendResult sent = producer.send(soon);

        Message sooner = new Message("orders", "in 1500 ms".getBytes());
        sooner.setDelayTimeMs(1_500);
        producer.send(sooner);
        // end send

        // begin receive
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("billing");
        consumer.setNamesrvAddr(address);
        consumer.subscribe("orders", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> System.out.println("received: " + new String(message.getBody())));
            arrived.countDown();
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        // end receive

        boolean isAll = arrived.await(LIMIT_S, TimeUnit.SECONDS);
        consumer.shutdown();
        producer.shutdown();
        System.out.println(isAll ? "ok: " + sent.getMsgId() + " and its neighbour arrived" : "FAILED: one did not arrive");
        System.exit(isAll ? 0 : 1);
    }
}
