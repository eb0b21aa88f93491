import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;

/** Many messages due at one instant: how long after it the last is visible, or in the listener's hands. */
final class Burst {
    private static final long AHEAD_MS = 6_000;
    private static final long QUIET_MS = 2_000; // between the last send and the instant
    private static final long POLL_MS = 2;

    static void received(Client client, int count, double slack) throws Exception {
        AtomicInteger received = new AtomicInteger();
        AtomicInteger early = new AtomicInteger();
        AtomicLong lastMicros = new AtomicLong();
        client.listen((message, atMicros, context) -> {
            if (atMicros < Client.fromMicros(message)) {
                early.incrementAndGet();
            }
            if (received.incrementAndGet() == count) {
                lastMicros.set(atMicros);
            }
            return true;
        });
        long dueAtMs = sent(client, count, slack);
        Client.until(count + " messages at the consumer", () -> lastMicros.get() > 0);
        Bench.measured();
        Bench.figure("last_s", lastMicros.get() / 1e6 - dueAtMs / 1e3);
        Bench.figure("early", early.get());
    }

    static void visible(Client client, int count, double slack) throws Exception {
        long dueAtMs = sent(client, count, slack);
        Thread.sleep(Math.max(dueAtMs - System.currentTimeMillis() - 20, 0));
        long endMs = dueAtMs + 150_000;
        while (client.visible() < count) {
            if (System.currentTimeMillis() > endMs) {
                throw new IllegalStateException(client.visible() + " of " + count + " are visible after 150 s");
            }
            Thread.sleep(POLL_MS);
        }
        long atMicros = Client.nowMicros();
        Bench.measured();
        Bench.figure("visible_s", atMicros / 1e6 - dueAtMs / 1e3);
    }

    /**
     * Sends them all and returns when they are due: as soon as the rate of this system allows, with some slack, and some
     * seconds. Where that was too soon nothing can be measured.
     */
    private static long sent(Client client, int count, double slack) throws Exception {
        double rate = client.warm();
        Bench.ready();
        long dueAtMs = System.currentTimeMillis() + (long) (count / rate * slack * 1_000) + AHEAD_MS;
        double actual = client.send(count, index -> client.timed(dueAtMs));
        if (System.currentTimeMillis() > dueAtMs - QUIET_MS) {
            throw new Bench.TooSoon("sent at " + (long) actual + "/s, expected " + (long) rate + "/s");
        }
        return dueAtMs;
    }
}
