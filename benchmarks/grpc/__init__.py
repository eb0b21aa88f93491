"""Postdate's gRPC port beside a real RocketMQ with its proxy, in one run: `python -m benchmarks.grpc`."""
