"""Postdate beside a real RocketMQ, in one run: `python -m benchmarks.rocketmq`."""
