"""The Spark data source "postdate": topics as rows, and rows as messages."""
