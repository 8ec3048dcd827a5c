"""Faster nodes for slow ones, an order that keeps less, parts computed twice."""
