"""Predicts the memory and the time of a step of every way to divide a model over ranks. Trains nothing."""
