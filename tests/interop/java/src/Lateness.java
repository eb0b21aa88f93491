import java.util.ArrayList;
import java.util.Collections;
import java.util.List;

/** How much later than due messages arrived: printed, never judged. Arriving early is judged. */
final class Lateness {
    private final List<Long> spansMs = new ArrayList<>();

    /** {@code earliestMs} is the first instant at which the message may be due by what the producer knows. */
    void add(Inbox.Arrival arrival, long earliestMs) {
        Interop.check(
                arrival.atMs >= earliestMs,
                arrival.text + " arrived " + (earliestMs - arrival.atMs) + " ms before it was due");
        Interop.check(
                arrival.message.getStoreTimestamp() >= earliestMs,
                arrival.text + " was visible " + (earliestMs - arrival.message.getStoreTimestamp()) + " ms too early");
        spansMs.add(arrival.atMs - earliestMs);
    }

    @Override
    public String toString() {
        Collections.sort(spansMs);
        return String.format("lateness p50 %d ms, p99 %d ms, max %d ms", at(0.5), at(0.99), at(1));
    }

    private long at(double share) {
        return spansMs.get((int) Math.min(spansMs.size() - 1, share * spansMs.size()));
    }
}
