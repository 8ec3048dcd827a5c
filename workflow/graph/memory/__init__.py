"""Memory that a graph needs while it runs, computed from shapes alone."""
