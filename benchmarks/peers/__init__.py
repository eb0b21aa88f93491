"""Postdate and what people would pick instead: the same work, side by side, in one run."""
