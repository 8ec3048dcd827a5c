"""The parts of `ortflow.export`, which exports PyTorch modules for training."""
