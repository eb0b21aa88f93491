"""The table of far messages: a Delta table, through pyarrow and deltalake. No Spark and no broker in here."""
