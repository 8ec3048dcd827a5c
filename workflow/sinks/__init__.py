"""Gives a run's metrics to other services: Prometheus, Weights & Biases, MLflow, OpenTelemetry, or a package's.

A process beside rank 0 reads the events that rank 0 writes anyway, so that a service that fails or hangs costs no step.
"""
