import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Locale;

/**
 * One measure of one system, by lines that the command which started it reads and answers.
 *
 * <p>"ready" and "measured" stand around what is measured, and each waits for an empty line, so that the command can
 * look at the server in between. "figure NAME VALUE" are the results.
 */
final class Bench {
    private static final int TOO_SOON = 3; // the exit code; program.py knows it

    /** Messages were due before all were sent. */
    static final class TooSoon extends Exception {
        TooSoon(String message) {
            super(message);
        }
    }

    interface Work {
        void measure() throws Exception;
    }

    private static final BufferedReader INPUT =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

    /** Runs one measure, and ends this process by its exit code: a client's threads that nobody ends would hold it up. */
    static void run(Work work) {
        try {
            work.measure();
            System.exit(0);
        } catch (TooSoon error) {
            System.err.println(error.getMessage());
            System.exit(TOO_SOON);
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1);
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
