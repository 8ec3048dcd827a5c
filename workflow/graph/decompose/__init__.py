"""Decompositions of operators into other operators; `operators` lists them all."""
