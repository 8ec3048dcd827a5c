"""The run file: the types of its sections."""
