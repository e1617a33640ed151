"""One file a mode, each one loop that reads from top to bottom."""
