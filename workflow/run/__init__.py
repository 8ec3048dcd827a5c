"""A run's directory and records, and what each process of a run has: signals, fence, engine."""
