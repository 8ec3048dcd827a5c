"""Runs on Kubernetes: the client's side (`launcher`), and what runs in the pods (`run_supervisor`, `worker`)."""
