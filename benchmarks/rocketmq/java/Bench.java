import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Locale;

/**
 * One measure of one system: java Bench ROUTE_ADDRESS TOPIC MEASURE ARGUMENTS...
 *
 * <p>It talks with the command that started it by lines. "ready" and "measured" stand around what is measured, and each
 * waits for an empty line, so that the command can look at the server in between. "figure NAME VALUE" are the results.
 */
final class Bench {
    private static final int TOO_SOON = 3; // the exit code; program.py knows it

    /** Messages were due before all were sent. */
    static final class TooSoon extends Exception {
        TooSoon(String message) {
            super(message);
        }
    }

    private static final BufferedReader INPUT =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

    public static void main(String[] arguments) {
        try (Client client = new Client(arguments[0], arguments[1])) {
            measure(client, arguments);
            client.close();
            System.exit(0); // threads of the client that nobody ends would hold us up
        } catch (TooSoon error) {
            System.err.println(error.getMessage());
            System.exit(TOO_SOON);
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1);
        }
    }

    private static void measure(Client client, String[] arguments) throws Exception {
        int count = Integer.parseInt(arguments[3]);
        switch (arguments[2]) {
            case "sends":
                Sends.measure(client, count, arguments[4].equals("timed"), Integer.parseInt(arguments[5]));
                break;
            case "lateness":
                Lateness.timed(client, count, Long.parseLong(arguments[4]), Double.parseDouble(arguments[5]));
                break;
            case "latency":
                Lateness.plain(client, count, Long.parseLong(arguments[4]));
                break;
            case "received":
                Burst.received(client, count, Double.parseDouble(arguments[4]));
                break;
            case "visible":
                Burst.visible(client, count, Double.parseDouble(arguments[4]));
                break;
            case "retry":
                Retry.measure(client);
                break;
            default:
                throw new IllegalArgumentException(arguments[2] + " is no measure");
        }
    }

    static void ready() throws Exception {
        pause("ready");
    }

    static void measured() throws Exception {
        pause("measured");
    }

    private static void pause(String word) throws Exception {
        System.out.println(word);
        if (INPUT.readLine() == null) {
            throw new IllegalStateException("the command that started this program is gone");
        }
    }

    static void figure(String name, double value) {
        System.out.println(String.format(Locale.ROOT, "figure %s %.4f", name, value));
    }
}
