"""A run file as text: read with line numbers, changed from the command line, written, described."""
