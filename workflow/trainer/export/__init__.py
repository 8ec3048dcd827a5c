"""Writes the trained model, and compares it with the graph it was made from."""
