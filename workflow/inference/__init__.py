"""A trained model on another set: its loss and metrics, and its outputs, in one process."""
