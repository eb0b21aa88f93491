import org.apache.rocketmq.client.common.ClientErrorCode;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;

/** What a server does not do: topics by itself, where auto_create_topics is off, and filters by SQL. */
final class Refusals {
    public static void main(String[] arguments) {
        Interop.run(arguments, Refusals::tell);
    }

    private static void tell() throws Exception {
        DefaultMQProducer producer = Interop.producer("refusals-producer");
        try {
            producer.send(Interop.message("nowhere", "lost"));
            throw new AssertionError("a send to an unknown topic succeeded although topics are not made automatically");
        } catch (MQClientException error) {
            Interop.same(ClientErrorCode.NOT_FOUND_TOPIC_EXCEPTION, error.getResponseCode(), "the client's code");
            Interop.ok("a send to an unknown topic fails: " + error.getErrorMessage());
        }
        producer.send(Interop.message("known", "found"));
        Interop.ok("a topic that an operator has made takes messages");
        DefaultMQPushConsumer consumer = Interop.consumer("refusals-sql", "known", "*");
        consumer.subscribe("known", MessageSelector.bySql("a > 1"));
        consumer.registerMessageListener(new Inbox());
        try {
            consumer.start();
            throw new AssertionError("a consumer with an SQL filter started");
        } catch (MQClientException error) {
            Interop.ok("a consumer with an SQL filter does not start: " + error.getErrorMessage());
        }
        producer.shutdown();
    }
}
