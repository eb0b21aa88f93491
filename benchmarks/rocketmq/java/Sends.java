import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;

/** Messages sent per second: by so many threads, each waiting for its answer, or by 0 threads, asynchronously. */
final class Sends {
    private static final int WARM_COUNT = 500;

    static <M> void measure(Load<M, ?> client, int count, boolean timed, int threads) throws Exception {
        Load.Source<M> source =
                timed ? index -> client.timed(System.currentTimeMillis() + Load.LATER_MS) : index -> client.message(1);
        client.warm();
        client.send(WARM_COUNT, source);
        if (threads > 0) {
            byThreads(client, WARM_COUNT, threads, source);
        }
        Bench.ready();
        double rate = threads == 0 ? client.send(count, source) : byThreads(client, count, threads, source);
        Bench.measured();
        Bench.figure("rate", rate);
    }

    private static <M> double byThreads(Load<M, ?> client, int count, int threads, Load.Source<M> source)
            throws Exception {
        AtomicInteger next = new AtomicInteger();
        List<Thread> senders = new ArrayList<>();
        for (int number = 0; number < threads; number++) {
            senders.add(new Thread(() -> sendSome(client, count, next, source)));
        }
        long start = System.nanoTime();
        senders.forEach(Thread::start);
        for (Thread sender : senders) {
            sender.join();
        }
        double seconds = (System.nanoTime() - start) / 1e9;
        client.check();
        return count / seconds;
    }

    private static <M> void sendSome(Load<M, ?> client, int count, AtomicInteger next, Load.Source<M> source) {
        try {
            for (int index = next.getAndIncrement(); index < count; index = next.getAndIncrement()) {
                client.sendAndWait(source.at(index));
            }
        } catch (Exception error) {
            client.fail(error);
        }
    }
}
