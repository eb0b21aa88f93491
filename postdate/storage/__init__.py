"""The log: records in batches, batches in segments, and the queues that index them."""
