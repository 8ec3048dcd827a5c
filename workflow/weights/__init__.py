"""Weights under PyTorch's names: files of other programs as the start of a run, and a run's weights for PyTorch."""
