"""A model file taken apart, for training and for `ortflow inspect`."""
