"""The gRPC port: what RocketMQ 5's clients call, answered by the same objects that answer the older protocol."""
