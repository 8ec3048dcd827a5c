"""The protocols of trainers, and what they exchange with the steps. `ortflow.workflow.trainer` has all names."""
