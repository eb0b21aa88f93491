import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.function.Function;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.apis.message.MessageView;

/** What a push consumer got, in order, and when. */
final class Inbox {
    static final class Arrival {
        final MessageView message;
        final String text;
        final long atMs = System.currentTimeMillis();

        Arrival(MessageView message) {
            this.message = message;
            this.text = Clients.text(message);
        }
    }

    private final ConcurrentLinkedQueue<Arrival> arrivals = new ConcurrentLinkedQueue<>();

    void add(MessageView message) {
        arrivals.add(new Arrival(message));
    }

    List<Arrival> all() {
        return new ArrayList<>(arrivals);
    }

    List<Arrival> of(String text) {
        return all().stream().filter(arrival -> arrival.text.equals(text)).collect(Collectors.toList());
    }

    /** The first of each text. */
    Map<String, Arrival> byText() {
        return all().stream().collect(Collectors.toMap(arrival -> arrival.text, Function.identity(), (one, two) -> one));
    }

    /** Waits for that many, and makes sure that there is not one more. */
    List<Arrival> await(int count, String what) throws Exception {
        Checks.until(count + " of " + what, () -> all().size() >= count);
        Checks.same(count, all().size(), what);
        return all();
    }
}
