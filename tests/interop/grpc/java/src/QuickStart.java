import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;

public class QuickStart {
    public static void main(String[] arguments) throws Exception {
        ClientServiceProvider provider = ClientServiceProvider.loadService();
        ClientConfiguration configuration = ClientConfiguration.newBuilder()
                .setEndpoints(arguments.length > 0 ? arguments[0] : "127.0.0.1:8081")
                .enableSsl(false)
                .build();
        CountDownLatch received = new CountDownLatch(1);

        PushConsumer consumer = provider.newPushConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup("invoicing")
                .setSubscriptionExpressions(Map.of("invoices", FilterExpression.SUB_ALL))
                .setMessageListener(message -> {
                    System.out.println("received: " + StandardCharsets.UTF_8.decode(message.getBody()));
                    received.countDown();
                    return ConsumeResult.SUCCESS;
                })
                .build();
        Producer producer = provider.newProducerBuilder()
                .setClientConfiguration(configuration)
                .setTopics("invoices")
                .build();

        Message message = provider.newMessageBuilder()
                .setTopic("invoices")
                .setBody("pay, please".getBytes(StandardCharsets.UTF_8))
                .setDeliveryTimestamp(System.currentTimeMillis() + 2_000)
                .build();
        System.out.println("sent: " + producer.send(message).getMessageId());

        received.await();
        producer.close();
        consumer.close();
    }
}
