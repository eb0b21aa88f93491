import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStreamWriter;
import java.io.Writer;
import java.nio.charset.StandardCharsets;
import java.util.Collection;
import java.util.HashSet;
import java.util.Set;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;

/** A push consumer and Postdate's own client, which pops, in one group: none gets what the other gets, nothing is lost. */
final class Mixed {
    private static final String TOPIC = "mixed";
    private static final String GROUP = "mixed-group";
    private static final int COUNT = 400;

    private static String[] program; // how to start our client

    public static void main(String[] arguments) {
        program = new String[] {arguments[1], arguments[2]};
        Interop.run(arguments, Mixed::tell);
    }

    private static void tell() throws Exception {
        DefaultMQProducer producer = Interop.producer("mixed-producer");
        Interop.createTopic(producer, TOPIC, 8);
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = Interop.consumer(GROUP, TOPIC, "*");
        consumer.registerMessageListener(inbox);
        consumer.start();
        Popper popper = new Popper();
        share(producer, inbox, popper);
        die(producer, inbox, popper);
        leave(producer, consumer, inbox);
        producer.shutdown();
    }

    private static void share(DefaultMQProducer producer, Inbox inbox, Popper popper) throws Exception {
        int[] sent = {0};
        Interop.until("both read their own four queues", () -> {
            long sinceMs = System.currentTimeMillis();
            String round = "warm-" + sent[0]++;
            for (int index = 0; index < 16; index++) {
                producer.send(new Message(TOPIC, (round + "-" + index).getBytes(StandardCharsets.UTF_8)));
            }
            Interop.until("a round is read", () -> inbox.count(round + "-") + popper.count(round + "-") >= 16);
            Set<Integer> read = inbox.all().stream().filter(arrival -> arrival.atMs >= sinceMs)
                    .map(arrival -> arrival.message.getQueueId()).collect(Collectors.toSet());
            return read.size() == 4 && popper.count(round + "-") == 8;
        });
        for (int index = 0; index < COUNT; index++) {
            producer.send(new Message(TOPIC, ("m-" + index).getBytes(StandardCharsets.UTF_8)));
        }
        Interop.until("all are read", () -> inbox.count("m-") + popper.count("m-") >= COUNT);
        Set<String> both = new HashSet<>(popper.got);
        both.removeIf(text -> !text.startsWith("m-") || !inbox.has(text));
        Interop.check(both.isEmpty(), "both got " + both);
        Interop.check(inbox.count("m-") > 0 && popper.count("m-") > 0, "one of them got nothing");
        Interop.ok("a push consumer got " + inbox.count("m-") + " of " + COUNT + " messages, a popping member the others");
    }

    private static void die(DefaultMQProducer producer, Inbox inbox, Popper popper) throws Exception {
        for (int index = 0; index < 16; index++) {
            producer.send(new Message(TOPIC, ("hold-" + index).getBytes(StandardCharsets.UTF_8)));
        }
        Interop.until("the popping member has some in hand", () -> popper.count("hold-") >= 4);
        popper.tell("die");
        Interop.until("the push consumer gets what the dead member had", () -> inbox.count("hold-") == 16);
        Interop.ok("what a popping member had in hand when it died came to the push consumer");
    }

    private static void leave(DefaultMQProducer producer, DefaultMQPushConsumer consumer, Inbox inbox) throws Exception {
        Popper popper = new Popper();
        Interop.until("the next popping member reads", () -> {
            producer.send(new Message(TOPIC, "next".getBytes(StandardCharsets.UTF_8)));
            return popper.count("next") > 0;
        });
        consumer.shutdown();
        for (int index = 0; index < 16; index++) {
            producer.send(new Message(TOPIC, ("last-" + index).getBytes(StandardCharsets.UTF_8)));
        }
        Interop.until("the popping member reads all queues", () -> popper.count("last-") + inbox.count("last-") == 16);
        popper.tell("stop");
        Interop.same(0, popper.process.waitFor(), "the exit code of a member that was stopped");
        Interop.ok("after the push consumer had left, the popping member read its queues, too");
    }

    /** Our client, in a process of its own. */
    private static final class Popper {
        final Collection<String> got = new ConcurrentLinkedQueue<>();
        final Process process;

        Popper() throws IOException {
            process = new ProcessBuilder(program[0], program[1], Interop.route, GROUP, TOPIC)
                    .redirectError(ProcessBuilder.Redirect.INHERIT).start();
            Runtime.getRuntime().addShutdownHook(new Thread(process::destroyForcibly));
            Thread reader = new Thread(this::read);
            reader.setDaemon(true);
            reader.start();
        }

        private void read() {
            try (BufferedReader lines = new BufferedReader(
                    new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8))) {
                for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                    got.add(line.substring("got ".length()));
                }
            } catch (IOException ended) {
                System.out.println("the output of our client ended: " + ended.getMessage());
            }
        }

        long count(String prefix) {
            return got.stream().filter(text -> text.startsWith(prefix)).distinct().count();
        }

        void tell(String word) throws IOException {
            try (Writer writer = new OutputStreamWriter(process.getOutputStream(), StandardCharsets.UTF_8)) {
                writer.write(word + "\n");
            }
        }
    }
}
