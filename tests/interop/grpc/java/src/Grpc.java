/** RocketMQ's Java client for gRPC against a broker: one part after the other. The argument is the broker's address. */
final class Grpc {
    private Grpc() {}

    public static void main(String[] arguments) {
        Clients.address = arguments[0];
        try {
            Messages.tell();
            Delays.tell();
            Order.tell();
            Transactions.tell();
            Retries.tell();
            Restart.tell();
        } catch (Throwable failure) {
            System.out.println("FAILED: " + failure.getMessage());
            failure.printStackTrace(System.out);
            System.exit(1);
        }
        System.exit(0);
    }
}
