"""The view `pending`: everything that waits, for Spark SQL."""
