/** One measure of one system over gRPC: java Grpc ADDRESS TOPIC MEASURE ARGUMENTS... The topic exists, for delays. */
final class Grpc {
    public static void main(String[] arguments) {
        Bench.run(() -> {
            try (GrpcClient client = new GrpcClient(arguments[0], arguments[1])) {
                measure(client, arguments);
            }
        });
    }

    private static void measure(GrpcClient client, String[] arguments) throws Exception {
        int count = Integer.parseInt(arguments[3]);
        switch (arguments[2]) {
            case "sends":
                Sends.measure(client, count, true, 0);
                break;
            case "lateness":
                Lateness.timed(client, count, Long.parseLong(arguments[4]), Double.parseDouble(arguments[5]));
                break;
            default:
                throw new IllegalArgumentException(arguments[2] + " is no measure");
        }
    }
}
