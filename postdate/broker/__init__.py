"""The broker: calls that validate, write one batch to the log and give a ticket."""

from postdate.broker.broker import Broker

__all__ = ["Broker"]
