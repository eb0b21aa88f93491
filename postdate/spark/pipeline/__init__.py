"""The pipeline: Spark carries far messages from the log to a table sorted by due, and back as chunks before they are
due.
"""
