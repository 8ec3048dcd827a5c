"""Tables as sets of samples: CSV, TSV, JSON lines, Parquet and Arrow files are read where they are."""
