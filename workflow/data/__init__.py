"""Samples: Arrow files that are memory-mapped, an order from seed and epoch alone, and batches that can start anywhere.

Import from the modules: `dataset`, `order`, `plan`, `feed`, `check`, `batches`, and `convert` for writing. They need
numpy and pyarrow (`ortflow[train]`); `mapping` needs neither.
"""
