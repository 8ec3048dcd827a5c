"""What a person sees of a run's progress: lines, and the panel on a terminal."""
