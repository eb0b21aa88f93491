import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.message.MessageExt;

/** What a consumer got, and when. Also a listener that takes everything. */
final class Inbox implements MessageListenerConcurrently {
    static final class Arrival {
        final MessageExt message;
        final String text;
        final long atMs = System.currentTimeMillis();

        Arrival(MessageExt message) {
            this.message = message;
            this.text = new String(message.getBody(), StandardCharsets.UTF_8);
        }
    }

    private final Collection<Arrival> arrivals = new ConcurrentLinkedQueue<>();

    @Override
    public ConsumeConcurrentlyStatus consumeMessage(List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        add(messages);
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }

    void add(List<MessageExt> messages) {
        messages.forEach(message -> arrivals.add(new Arrival(message)));
    }

    List<Arrival> all() {
        return new ArrayList<>(arrivals);
    }

    List<Arrival> of(String text) {
        return all().stream().filter(arrival -> arrival.text.equals(text)).collect(Collectors.toList());
    }

    /** Different texts that start so. */
    long count(String prefix) {
        return all().stream().map(arrival -> arrival.text).filter(text -> text.startsWith(prefix)).distinct().count();
    }

    boolean has(String text) {
        return !of(text).isEmpty();
    }

    Arrival await(String text) throws Exception {
        Interop.until(text + " has not arrived", () -> has(text));
        return of(text).get(0);
    }

    void awaitAll(String prefix, int count) throws Exception {
        Interop.until(prefix + ": " + count + " messages", () -> count(prefix) >= count);
        Interop.same((long) count, count(prefix), "messages of " + prefix);
    }

    /** A message may be handed out again, but it has one place in its queue. */
    void checkPlaces() {
        Map<String, String> places = new HashMap<>();
        for (Arrival arrival : all()) {
            MessageExt message = arrival.message;
            String place = message.getTopic() + "/" + message.getQueueId() + "/" + message.getQueueOffset();
            String before = places.put(arrival.text, place);
            Interop.check(
                    before == null || before.equals(place),
                    arrival.text + " is twice in its queue: at " + before + " and at " + place);
        }
    }
}
