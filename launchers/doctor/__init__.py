"""`ortflow doctor` for this machine, its GPUs and an image."""
