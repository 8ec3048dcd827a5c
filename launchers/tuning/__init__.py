"""`ortflow tune`: a search over keys of a run file, whose runs are those of a sweep, on any launcher."""
