"""What a graph takes while it runs, from its shapes alone."""
