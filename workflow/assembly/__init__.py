"""Builds the graphs of a run from its model, and loads them in a separate process as a test."""
