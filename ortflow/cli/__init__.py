"""The command line: one small module a verb."""

import gc

# Starting means making objects that stay: the collector would look through them some twenty times and find nothing.
gc.set_threshold(200_000, 10, 10)
