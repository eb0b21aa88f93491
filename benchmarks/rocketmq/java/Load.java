import java.nio.ByteBuffer;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.BooleanSupplier;
import java.util.function.Consumer;

/**
 * What a measure asks of a client, whichever protocol it speaks: messages of type M, and answers to sends of type R.
 *
 * <p>A body begins with an instant, in microseconds, from which its listener counts: when the message is due, or when it
 * was sent. One that begins with PROBE is not counted.
 */
abstract class Load<M, R> implements AutoCloseable {
    static final int BODY_BYTES = 200;
    static final long PROBE = 0;
    static final long LATER_MS = 6 * 3_600_000; // long after everything has ended
    private static final int WARM_COUNT = 10_000;
    private static final long WAIT_MS = 150_000;

    private final int inFlight;
    private final AtomicReference<Throwable> failure = new AtomicReference<>();

    /** One that has at most that many sends unanswered. */
    Load(int inFlight) {
        this.inFlight = inFlight;
    }

    interface Source<M> {
        M at(int index);
    }

    interface Then<R> {
        void sent(int index, R result);
    }

    interface Instants {
        /** When a message was due or sent, and when it came. */
        void got(long fromMicros, long atMicros);
    }

    abstract M message(long fromMicros);

    /** A message due at that instant. */
    abstract M timed(long dueAtMs);

    /** Sends one; `then` is run when it is answered or has failed, `stored` before that with the answer. */
    abstract void sendAsync(M message, Consumer<R> stored, Runnable then) throws Exception;

    /** Sends one and waits for its answer. */
    abstract void sendAndWait(M message) throws Exception;

    /** Starts a consumer of a new group and returns when it reads; probes are kept from the listener. */
    abstract void listen(Instants listener) throws Exception;

    @Override
    public abstract void close();

    static byte[] body(long fromMicros) {
        return ByteBuffer.allocate(BODY_BYTES).putLong(fromMicros).array();
    }

    static long nowMicros() {
        return ChronoUnit.MICROS.between(Instant.EPOCH, Instant.now());
    }

    static void until(String what, BooleanSupplier holds) throws Exception {
        long endMs = System.currentTimeMillis() + WAIT_MS;
        while (!holds.getAsBoolean()) {
            if (System.currentTimeMillis() > endMs) {
                throw new IllegalStateException(what + ": not after " + WAIT_MS / 1_000 + " s");
            }
            Thread.sleep(5);
        }
    }

    /** Sends so many, as many unanswered as this client may have; returns messages per second. */
    final double send(int count, Source<M> source) throws Exception {
        return send(count, source, (index, result) -> { });
    }

    final double send(int count, Source<M> source, Then<R> then) throws Exception {
        Semaphore free = new Semaphore(inFlight);
        long start = System.nanoTime();
        for (int at = 0; at < count; at++) {
            int index = at;
            free.acquire();
            sendAsync(source.at(index), result -> then.sent(index, result), free::release);
        }
        free.acquire(inFlight);
        double seconds = (System.nanoTime() - start) / 1e9;
        check();
        return count / seconds;
    }

    final void sendAsync(M message, Runnable then) throws Exception {
        sendAsync(message, result -> { }, then);
    }

    /** Sends until this JVM has compiled the way; returns the rate. Nothing of it comes. */
    final double warm() throws Exception {
        send(WARM_COUNT, index -> timed(System.currentTimeMillis() + LATER_MS));
        return send(WARM_COUNT, index -> timed(System.currentTimeMillis() + LATER_MS));
    }

    final void fail(Throwable error) {
        failure.compareAndSet(null, error);
    }

    final void check() throws Exception {
        if (failure.get() != null) {
            throw new IllegalStateException("a send failed", failure.get());
        }
    }
}
