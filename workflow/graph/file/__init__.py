"""Model files, which are not trusted: reading them, and what they may ask for."""
