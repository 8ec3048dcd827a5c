"""Rules between the keys of a run file, and checks for what a scheduler would refuse or never start. Pure."""
