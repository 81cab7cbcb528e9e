"""A live view of runs in the terminal."""
