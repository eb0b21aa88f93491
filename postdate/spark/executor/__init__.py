"""What runs on Spark's executors. This folder travels to them; it needs pyarrow and nothing else."""
