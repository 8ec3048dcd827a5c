"""The files of `ortflow demo`, which copies them into a folder."""
