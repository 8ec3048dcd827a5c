"""A run file as text: read with the line of every key, changed from the command line, written, described."""
