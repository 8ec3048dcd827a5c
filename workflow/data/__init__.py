"""Samples: memory-mapped Arrow files, an order determined by seed and epoch, and batches that can start anywhere.

Import from the modules: `dataset`, `order`, `epoch_positions`, `feed`, `check`, `batches`, and `convert` for writing.
They need numpy and pyarrow (`ortflow[train]`); `mapping` needs neither.
"""
