import org.apache.rocketmq.client.apis.ClientException;

/** Checks that print, and waiting with a limit. */
final class Checks {
    /**
     * How long to wait for something that must happen. Nothing is asserted about how soon it does. A message that was on
     * its way to a push consumer when the broker was killed comes again after a minute.
     */
    private static final long LIMIT_MS = 100_000;

    private Checks() {}

    interface Condition {
        boolean holds() throws Exception;
    }

    static void ok(String sentence) {
        System.out.println("ok: " + sentence.lines().findFirst().orElse(""));
    }

    static void check(boolean holds, String sentence) {
        if (!holds) {
            throw new AssertionError(sentence);
        }
    }

    static void same(Object expected, Object found, String what) {
        check(expected.equals(found), what + ": expected " + expected + ", found " + found);
    }

    static void until(String what, Condition condition) throws Exception {
        long end = System.currentTimeMillis() + LIMIT_MS;
        while (!condition.holds()) {
            check(System.currentTimeMillis() < end, "waited " + LIMIT_MS + " ms in vain: " + what);
            Thread.sleep(5);
        }
    }

    interface Attempt {
        void make() throws Exception;
    }

    /** The client puts the broker's code into its sentence, and may wrap that into others. */
    static void refusedWith(int code, String what, Attempt attempt) {
        try {
            attempt.make();
        } catch (Exception error) {
            for (Throwable cause = error; cause != null; cause = cause.getCause()) {
                if (cause instanceof ClientException && cause.getMessage().contains("response-code=" + code)) {
                    ok(what + " is refused: " + cause.getMessage());
                    return;
                }
            }
            throw new AssertionError(what + " was refused otherwise: " + error, error);
        }
        throw new AssertionError(what + " was not refused");
    }
}
