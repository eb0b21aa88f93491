"""The pipeline: Spark carries far messages from the log to a table sorted by due, and back as chunks before they are
due.

Driver:     driver, spark, source, batch, table, plan, tiers, history
Executors:  tasks, files, gate, steps: the standard library and pyarrow are all they need
Imports:    inputs, sink, imports, wishes; on executors columns and loading, which need the package installed
"""
