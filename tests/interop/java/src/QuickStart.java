import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;

public class QuickStart {
    public static void main(String[] arguments) throws Exception {
        String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:9876";
        CountDownLatch received = new CountDownLatch(1);

        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("invoicing");
        consumer.setNamesrvAddr(address);
        consumer.subscribe("invoices", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> System.out.println("received: " + new String(message.getBody())));
            received.countDown();
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();

        DefaultMQProducer producer = new DefaultMQProducer("shop");
        producer.setNamesrvAddr(address);
        producer.start();
        Message message = new Message("invoices", "pay, please".getBytes());
        message.setDelayTimeMs(2_000); // or setDelayTimeSec, setDeliverTimeMs, setDelayTimeLevel
        System.out.println("sent: " + producer.send(message).getMsgId());

        received.await();
        consumer.shutdown();
        producer.shutdown();
    }
}
