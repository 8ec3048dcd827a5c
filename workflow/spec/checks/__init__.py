"""Rules between keys of a run file, and checks for what a scheduler would reject or never start. Pure."""
