import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.MessageListener;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.ProducerBuilder;
import org.apache.rocketmq.client.apis.producer.TransactionChecker;

/** Producers and consumers with the address of the broker, by the way to reach it that the environment names. */
final class Clients {
    /** How long a message that was received stays invisible: longer than any check takes. */
    static final Duration INVISIBLE = Duration.ofSeconds(60);

    static final String USER = System.getenv("INTEROP_ACCESS_KEY");
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final Duration WAIT = Duration.ofSeconds(5);

    static String address;

    private Clients() {}

    private static ClientConfiguration configuration(String secret) {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder()
                .setEndpoints(address)
                .enableSsl(System.getenv("INTEROP_CA_FILE") != null); // it trusts every certificate
        if (USER != null) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(USER, secret));
        }
        return builder.build();
    }

    private static ClientConfiguration configuration() {
        return configuration(System.getenv("INTEROP_SECRET_KEY"));
    }

    static Producer producer(String topic) throws ClientException {
        return PROVIDER.newProducerBuilder().setClientConfiguration(configuration()).setTopics(topic).build();
    }

    static Producer producer(String topic, TransactionChecker checker) throws ClientException {
        ProducerBuilder builder = PROVIDER.newProducerBuilder().setClientConfiguration(configuration());
        return builder.setTopics(topic).setTransactionChecker(checker).build();
    }

    static Producer producerWithSecret(String topic, String secret) throws ClientException {
        return PROVIDER.newProducerBuilder().setClientConfiguration(configuration(secret)).setTopics(topic).build();
    }

    /**
     * Starts a consumer that puts what it gets into the inbox, then lets the listener decide. It ends with the process:
     * to close one takes up to 20 s, as it waits for what it has asked the broker.
     */
    static void push(String group, String topic, String tags, Inbox inbox, MessageListener listener)
            throws ClientException {
        PROVIDER.newPushConsumerBuilder()
                .setClientConfiguration(configuration())
                .setConsumerGroup(group)
                .setSubscriptionExpressions(Map.of(topic, new FilterExpression(tags)))
                .setMessageListener(message -> {
                    inbox.add(message);
                    return listener.consume(message);
                })
                .build();
    }

    static SimpleConsumer simple(String group, String topic) throws ClientException {
        return PROVIDER.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration())
                .setConsumerGroup(group)
                .setSubscriptionExpressions(Map.of(topic, new FilterExpression("*")))
                .setAwaitDuration(WAIT)
                .build();
    }

    /** Receives until there are that many; acknowledges nothing. */
    static List<MessageView> receive(SimpleConsumer consumer, int count) throws Exception {
        List<MessageView> received = new ArrayList<>();
        Checks.until(count + " messages of " + consumer.getConsumerGroup(), () -> {
            received.addAll(consumer.receive(32, INVISIBLE));
            return received.size() >= count;
        });
        Checks.same(count, received.size(), "messages of " + consumer.getConsumerGroup());
        return received;
    }

    /** The dead letter of a group, acknowledged. There may be no such topic before the first one. */
    static MessageView deadLetter(String group) throws Exception {
        SimpleConsumer[] reader = {null};
        Checks.until("a topic for dead letters of " + group, () -> {
            try {
                reader[0] = simple(group + "-letters", "%DLQ%" + group);
            } catch (IllegalStateException noTopicYet) {
                return false;
            }
            return true;
        });
        MessageView letter = receive(reader[0], 1).get(0);
        reader[0].ack(letter);
        reader[0].close();
        return letter;
    }

    static MessageBuilder message(String topic, String text) {
        return PROVIDER.newMessageBuilder().setTopic(topic).setBody(text.getBytes(StandardCharsets.UTF_8));
    }

    static String text(MessageView message) {
        return StandardCharsets.UTF_8.decode(message.getBody()).toString();
    }
}
