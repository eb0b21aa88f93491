"""`postdate up` as a process of its own: the fault suite's, for tests."""

from postdate.faults.process import ROOT, SMALL_FILES, START_S, STOP_S, Broker, free_port, now_ms

__all__ = ["ROOT", "SMALL_FILES", "START_S", "STOP_S", "Broker", "free_port", "now_ms"]
