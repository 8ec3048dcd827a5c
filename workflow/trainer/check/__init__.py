"""Checks the gradient on a real micro-batch before the first step."""
