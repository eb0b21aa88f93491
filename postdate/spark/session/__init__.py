"""Spark sessions: Java, the session itself, and what Spark writes to stderr."""
