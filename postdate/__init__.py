"""Postdate: a broker for messages that must arrive later, spoken to by RocketMQ clients."""

__version__ = "0.1.0"
