import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.ThreadLocalRandom;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/**
 * What every program here needs: checks that print, waiting with a limit, clients with the address of the server.
 *
 * <p>A program is a main() that hands its story to {@link #run}. It prints one line per check; the first that fails ends
 * it with a sentence and exit code 1.
 */
final class Interop {
    /** How long to wait for something that must happen. Nothing is asserted about how soon it does. */
    static final long LIMIT_MS = 60_000;

    static String route;
    private static int clients;

    private Interop() {}

    interface Story {
        void tell() throws Exception;
    }

    interface Condition {
        boolean holds() throws Exception;
    }

    static void run(String[] arguments, Story story) {
        route = arguments[0];
        try {
            String headers = System.getProperty("rocketmq.serialize.type", "JSON");
            same(headers, RemotingCommand.getSerializeTypeConfigInThisServer().name(), "the form of headers");
            story.tell();
        } catch (Throwable failure) {
            System.out.println("FAILED: " + failure.getMessage());
            failure.printStackTrace();
            System.exit(1);
        }
        System.exit(0); // the client leaves threads behind
    }

    // -- checks -----------------------------------------------------------------------------------------------------

    /** One line: the client adds lines of advice to its own sentences. */
    static void ok(String sentence) {
        System.out.println("ok: " + sentence.lines().findFirst().orElse(""));
    }

    static void check(boolean holds, String sentence) {
        if (!holds) {
            throw new AssertionError(sentence);
        }
    }

    static void same(Object expected, Object found, String what) {
        boolean equal = expected instanceof byte[]
                ? Arrays.equals((byte[]) expected, (byte[]) found)
                : expected.equals(found);
        check(equal, what + ": expected " + expected + ", found " + found);
    }

    static void until(String what, Condition condition) throws Exception {
        long end = System.currentTimeMillis() + LIMIT_MS;
        while (!condition.holds()) {
            check(System.currentTimeMillis() < end, "waited " + LIMIT_MS + " ms in vain: " + what);
            Thread.sleep(5);
        }
    }

    /** The broker's refusal, which the client may have wrapped; fails where there is none. */
    static MQBrokerException refused(String what, Callable<?> attempt) {
        try {
            Object answer = attempt.call();
            throw new AssertionError(what + " was not refused, the answer is " + answer);
        } catch (Exception error) {
            for (Throwable cause = error; cause != null; cause = cause.getCause()) {
                if (cause instanceof MQBrokerException) {
                    return (MQBrokerException) cause;
                }
            }
            throw new AssertionError(what + " was refused by the client itself: " + error, error);
        }
    }

    static void refusedWith(int code, String what, Callable<?> attempt) {
        MQBrokerException refusal = refused(what, attempt);
        same(code, refusal.getResponseCode(), "the code for " + what);
        ok(what + " is refused with " + code + ": " + refusal.getErrorMessage());
    }

    // -- clients ----------------------------------------------------------------------------------------------------

    /** What signs every request of a client; null where nobody has said as whom. */
    static RPCHook signing() {
        String user = System.getenv("INTEROP_ACCESS_KEY");
        return user == null ? null : new AclClientRPCHook(new SessionCredentials(user, System.getenv("INTEROP_SECRET_KEY")));
    }

    static DefaultMQProducer producer(String group) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group, signing());
        producer.setNamesrvAddr(route);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        return producer;
    }

    /** Not started yet. Each is a client of its own: by default, those of one process share an id. */
    static DefaultMQPushConsumer consumer(String group, String topic, String tags) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, signing());
        consumer.setNamesrvAddr(route);
        consumer.setInstanceName("consumer-" + ++clients + "-" + ProcessHandle.current().pid());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(4);
        consumer.setConsumeThreadMax(4);
        consumer.subscribe(topic, tags);
        return consumer;
    }

    /** Made before its consumers start: those learn of a new topic only by their next poll, half a minute later. */
    static void createTopic(DefaultMQProducer producer, String topic, int queues) throws Exception {
        producer.createTopic("TBW102", topic, queues, null);
    }

    /** The dead letter of a group with this text; waits until there is one. */
    static MessageExt deadLetter(DefaultMQProducer producer, String group, String text) throws Exception {
        String topic = "%DLQ%" + group;
        until("a dead letter topic of " + group, () -> hasRoute(producer, topic));
        Inbox letters = new Inbox();
        DefaultMQPushConsumer reader = consumer(group + "-letters", topic, "*");
        reader.registerMessageListener(letters);
        reader.start();
        MessageExt letter = letters.await(text).message;
        reader.shutdown();
        return letter;
    }

    private static boolean hasRoute(DefaultMQProducer producer, String topic) {
        try {
            return !producer.fetchPublishMessageQueues(topic).isEmpty();
        } catch (Exception unknown) {
            return false;
        }
    }

    // -- messages ---------------------------------------------------------------------------------------------------

    static Message message(String topic, String text) {
        return new Message(topic, text.getBytes(StandardCharsets.UTF_8));
    }

    static List<Message> messages(String topic, String name, int count) {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            messages.add(message(topic, name + "-" + i));
        }
        return messages;
    }

    /** Bytes that no compression makes smaller. */
    static byte[] noise(int size) {
        byte[] bytes = new byte[size];
        ThreadLocalRandom.current().nextBytes(bytes);
        return bytes;
    }
}
