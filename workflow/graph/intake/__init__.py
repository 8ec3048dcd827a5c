"""Splits a model file into its parts, for training and for `ortflow inspect`."""
