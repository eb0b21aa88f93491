/** One measure of one system by the older protocol: java Remoting ROUTE_ADDRESS TOPIC MEASURE ARGUMENTS... */
final class Remoting {
    public static void main(String[] arguments) {
        Bench.run(() -> {
            try (Client client = new Client(arguments[0], arguments[1])) {
                measure(client, arguments);
            }
        });
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
}
