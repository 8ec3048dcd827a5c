"""The inference model."""
