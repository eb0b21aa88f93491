"""Proofs that Postdate keeps its promises: a simulation of the core and faults against real processes."""
