"""What stops a run, or leaves it: signals, callers and other processes."""
