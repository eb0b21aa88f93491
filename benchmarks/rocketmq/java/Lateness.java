import java.util.Arrays;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.locks.LockSupport;

/** How long after the instant in its body a message is in the listener's hands, at a modest rate. */
final class Lateness {
    private static final int WARM_COUNT = 2_000;
    private static final int WARM_PAUSE_NANOS = 1_000_000;
    private static final long AHEAD_MS = 4_000; // for sending, times the slack

    private final AtomicLongArray lateMicros;
    private final AtomicInteger received = new AtomicInteger();

    private Lateness(int count) {
        lateMicros = new AtomicLongArray(count);
    }

    /** Timed messages, spread evenly over a span and all sent before the first is due. */
    static <M> void timed(Load<M, ?> client, int count, long spanMs, double slack) throws Exception {
        Lateness lateness = listening(client, count);
        Bench.ready();
        long firstMs = System.currentTimeMillis() + (long) (AHEAD_MS * slack);
        client.send(count, index -> client.timed(firstMs + index * spanMs / count));
        if (System.currentTimeMillis() >= firstMs) {
            throw new Bench.TooSoon("sending took longer than " + (long) (AHEAD_MS * slack) + " ms");
        }
        lateness.tell(count, spanMs);
    }

    /** Messages without delay, sent evenly over a span. */
    static <M> void plain(Load<M, ?> client, int count, long spanMs) throws Exception {
        Lateness lateness = listening(client, count);
        Bench.ready();
        paced(client, count, spanMs * 1_000_000 / count);
        lateness.tell(count, 0);
    }

    /** A consumer that has already got some messages, so that both sides of this JVM are compiled. */
    private static <M> Lateness listening(Load<M, ?> client, int count) throws Exception {
        Lateness warm = new Lateness(WARM_COUNT);
        Lateness lateness = new Lateness(count);
        client.listen((fromMicros, atMicros) -> {
            Lateness wanted = warm.received.get() < WARM_COUNT ? warm : lateness;
            wanted.note(atMicros - fromMicros);
        });
        paced(client, WARM_COUNT, WARM_PAUSE_NANOS);
        Load.until("the first messages", () -> warm.received.get() >= WARM_COUNT);
        client.warm();
        return lateness;
    }

    private void note(long micros) {
        int index = received.getAndIncrement();
        if (index < lateMicros.length()) {
            lateMicros.set(index, micros);
        }
    }

    private static <M> void paced(Load<M, ?> client, int count, long pauseNanos) throws Exception {
        long start = System.nanoTime();
        for (int index = 0; index < count; index++) {
            long wait = start + index * pauseNanos - System.nanoTime();
            if (wait > 0) {
                LockSupport.parkNanos(wait);
            }
            client.sendAsync(client.message(Load.nowMicros()), () -> { });
        }
        client.check();
    }

    private void tell(int count, long waitMs) throws Exception {
        Thread.sleep(waitMs);
        Load.until(count + " messages", () -> received.get() >= count);
        Bench.measured();
        long[] sorted = new long[count];
        Arrays.setAll(sorted, lateMicros::get);
        Arrays.sort(sorted);
        Bench.figure("p50_ms", sorted[count / 2] / 1e3);
        Bench.figure("p99_ms", sorted[(int) (count * 0.99)] / 1e3);
        Bench.figure("max_ms", sorted[count - 1] / 1e3);
        Bench.figure("early", Arrays.stream(sorted).filter(micros -> micros < 0).count());
        Bench.figure("again", received.get() - count);
    }
}
