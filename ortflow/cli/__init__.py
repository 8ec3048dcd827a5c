"""The command line: one small module per command."""

import gc

# Most objects that are created at the start stay alive: some twenty garbage collections would find nothing.
gc.set_threshold(200_000, 10, 10)
