"""What a launcher process does for its runs, on every engine."""
