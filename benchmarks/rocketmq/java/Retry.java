import java.util.concurrent.atomic.AtomicLong;

/** A group that has never been there refuses a message, to have it again by delay level 1, a second later. */
final class Retry {
    private static final int LEVEL = 1;

    static void measure(Client client) throws Exception {
        AtomicLong firstMicros = new AtomicLong();
        AtomicLong secondMicros = new AtomicLong();
        client.listen(1, (message, atMicros, context) -> {
            if (firstMicros.compareAndSet(0, atMicros)) {
                context.setDelayLevelWhenNextConsume(LEVEL);
                return false;
            }
            secondMicros.compareAndSet(0, atMicros);
            return true;
        });
        Bench.ready();
        client.producer.send(client.message(Client.nowMicros()));
        Client.until("the message comes again", () -> secondMicros.get() > 0);
        Bench.measured();
        Bench.figure("again_s", (secondMicros.get() - firstMicros.get()) / 1e6);
    }
}
