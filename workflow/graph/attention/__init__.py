"""Attention, recognised in the operators that exporters write."""
