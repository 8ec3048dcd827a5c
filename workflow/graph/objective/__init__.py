"""What is attached to a forward graph: modes, loss, metrics; and what a batch has to bring."""
