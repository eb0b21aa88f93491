"""The state: everything that the durable log says, as a function of the log alone."""
