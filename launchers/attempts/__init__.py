"""What is known of a run's attempts: their logs, why they ended, and which nodes take part."""
