"""Attaches modes, loss and metrics to a forward graph, and determines the inputs of a batch."""
