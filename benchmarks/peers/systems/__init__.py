"""One module for each system: how it is started, filled, read and ended."""
