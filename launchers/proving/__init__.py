"""`ortflow prove`: runs a training calmly, runs it again with a kill, and names the state that the resume forgot."""
