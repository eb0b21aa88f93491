"""Faults for real processes. Processes under the layer run this file: it imports nothing."""
