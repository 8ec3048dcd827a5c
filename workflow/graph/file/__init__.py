"""Reading of model files, which are untrusted, and limits on what they may demand."""
