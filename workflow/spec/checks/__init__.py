"""What the keys of a run file must agree on, and what a scheduler would refuse or never start. Pure."""
