"""Faster equivalent nodes, a node order that needs less memory, and recomputation."""
