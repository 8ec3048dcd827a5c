"""Attention in the nodes that exporters write it by."""
