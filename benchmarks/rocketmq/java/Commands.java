import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * A client that does what it is told, line by line: java Commands BODY_BYTES INDEX_DIGITS. Arrays travel through files.
 *
 * <pre>
 * connect ADDRESS TOPIC              producer and consumer
 * schedule FIRST DUES HANDLES        DUES holds longs; HANDLES becomes one line for each
 * receive COUNT LIMIT_MS FILE        FILE becomes pairs of longs: index, microseconds since 1970
 * cancel HANDLES ANSWERS             one line for each: cancelled, or what was answered
 * visible                            how many messages the queues have; nothing is pulled until the next receive
 * </pre>
 *
 * Each is answered by one line, "ok" and what there is to say, or "failed" and why.
 */
final class Commands {
    private static final int CANCELLING_THREADS = 64;

    private static final class Got {
        final long index;
        final long atMicros;

        Got(long index, long atMicros) {
            this.index = index;
            this.atMicros = atMicros;
        }
    }

    private final int bodyBytes;
    private final int indexDigits;
    private final LinkedBlockingQueue<Got> received = new LinkedBlockingQueue<>();
    private Client client;

    private Commands(int bodyBytes, int indexDigits) {
        this.bodyBytes = bodyBytes;
        this.indexDigits = indexDigits;
    }

    public static void main(String[] arguments) throws Exception {
        Commands commands = new Commands(Integer.parseInt(arguments[0]), Integer.parseInt(arguments[1]));
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        System.out.println("ok ready");
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            System.out.println(commands.answer(line.split(" ")));
        }
        System.exit(0); // threads of the client that nobody ends would hold us up
    }

    private String answer(String[] words) {
        try {
            return "ok " + done(words);
        } catch (Exception error) {
            error.printStackTrace();
            return "failed " + String.valueOf(error).replace('\n', ' ');
        }
    }

    private String done(String[] words) throws Exception {
        switch (words[0]) {
            case "connect":
                return connect(words[1], words[2]);
            case "schedule":
                return schedule(Long.parseLong(words[1]), Path.of(words[2]), Path.of(words[3]));
            case "receive":
                return receive(Integer.parseInt(words[1]), Long.parseLong(words[2]), Path.of(words[3]));
            case "cancel":
                return cancel(Files.readAllLines(Path.of(words[1])), Path.of(words[2]));
            case "visible":
                client.pull(false);
                return String.valueOf(client.visible());
            default:
                throw new IllegalArgumentException(words[0] + " is no command");
        }
    }

    private String connect(String address, String topic) throws Exception {
        client = new Client(address, topic);
        client.consume((message, atMicros, context) -> received.add(new Got(index(message), atMicros)));
        return "connected";
    }

    private long index(MessageExt message) {
        return Long.parseLong(new String(message.getBody(), 0, indexDigits, StandardCharsets.US_ASCII));
    }

    private Message message(long index, long dueAtMs) {
        byte[] body = new byte[bodyBytes];
        Arrays.fill(body, (byte) 'x');
        for (int place = indexDigits - 1; place >= 0; place--, index /= 10) {
            body[place] = (byte) ('0' + index % 10);
        }
        Message message = new Message(client.topic, body);
        message.setDeliverTimeMs(dueAtMs);
        return message;
    }

    private String schedule(long first, Path dues, Path handles) throws Exception {
        ByteBuffer bytes = ByteBuffer.wrap(Files.readAllBytes(dues)).order(ByteOrder.LITTLE_ENDIAN);
        int count = bytes.capacity() / Long.BYTES;
        String[] found = new String[count];
        client.send(
                count,
                index -> message(first + index, bytes.getLong(index * Long.BYTES)),
                (index, result) -> found[index] = String.valueOf(result.getRecallHandle()));
        Files.write(handles, Arrays.asList(found));
        return String.valueOf(count);
    }

    private String receive(int count, long limitMs, Path file) throws Exception {
        ByteBuffer pairs = ByteBuffer.allocate(count * 2 * Long.BYTES).order(ByteOrder.LITTLE_ENDIAN);
        long endMs = System.currentTimeMillis() + limitMs;
        client.pull(true);
        while (pairs.hasRemaining()) {
            Got got = received.poll(Math.max(endMs - System.currentTimeMillis(), 0), TimeUnit.MILLISECONDS);
            if (got == null) {
                break;
            }
            pairs.putLong(got.index).putLong(got.atMicros);
        }
        Files.write(file, Arrays.copyOf(pairs.array(), pairs.position()));
        return String.valueOf(pairs.position() / 2 / Long.BYTES);
    }

    /** The client has no asynchronous recall: so many threads instead. */
    private String cancel(List<String> handles, Path file) throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(CANCELLING_THREADS);
        String[] answers = new String[handles.size()];
        try {
            Future<?>[] tasks = new Future<?>[CANCELLING_THREADS];
            for (int number = 0; number < CANCELLING_THREADS; number++) {
                int first = number;
                tasks[number] = threads.submit(() -> cancelSome(handles, first, answers));
            }
            for (Future<?> task : tasks) {
                task.get();
            }
        } finally {
            threads.shutdownNow();
        }
        Files.write(file, Arrays.asList(answers));
        return String.valueOf(answers.length);
    }

    private void cancelSome(List<String> handles, int first, String[] answers) {
        for (int place = first; place < answers.length; place += CANCELLING_THREADS) {
            try {
                client.producer.recallMessage(client.topic, handles.get(place));
                answers[place] = "cancelled";
            } catch (Exception error) {
                answers[place] = String.valueOf(error.getMessage()).replace('\n', ' ');
            }
        }
    }
}
