"""Imports: rows of files and frames, scheduled as messages."""
