"""Operators written out by others: `operators` names them all."""
