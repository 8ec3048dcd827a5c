"""What all unit tests share."""
