"""The graphs of a run, put together from its model, and tried in a process of their own."""
