"""Benchmarks: each figure that the documents claim, measured by one command, beside its goal and its floor."""
