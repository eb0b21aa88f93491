import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;

/** The pair of programs in RocketMQ's documentation: a hundred scheduled messages of level 3, which is 10 s. */
final class Classic {
    private static final int COUNT = 100;
    private static final long LEVEL_3_MS = 10_000;

    public static void main(String[] arguments) {
        Interop.run(arguments, Classic::tell);
    }

    private static void tell() throws Exception {
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = Interop.consumer("ExampleConsumer", "TestTopic", "*");
        consumer.registerMessageListener(inbox);
        consumer.start(); // first, as the documentation says: nobody has made the topic yet

        DefaultMQProducer producer = Interop.producer("ExampleProducerGroup");
        long[] sentAtMs = new long[COUNT];
        for (int i = 0; i < COUNT; i++) {
            Message message = Interop.message("TestTopic", "Hello scheduled message " + i);
            message.setDelayTimeLevel(3);
            sentAtMs[i] = System.currentTimeMillis();
            producer.send(message);
        }
        inbox.awaitAll("Hello scheduled message ", COUNT);

        Lateness lateness = new Lateness();
        for (int i = 0; i < COUNT; i++) {
            lateness.add(inbox.await("Hello scheduled message " + i), sentAtMs[i] + LEVEL_3_MS);
        }
        inbox.checkPlaces();
        consumer.shutdown();
        producer.shutdown();
        Interop.ok("100 messages of level 3 arrived 10 s after they were sent, none before; " + lateness);
    }
}
