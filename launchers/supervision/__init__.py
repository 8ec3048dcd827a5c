"""The supervisor: starts attempts, watches them, and starts again within the budgets."""
