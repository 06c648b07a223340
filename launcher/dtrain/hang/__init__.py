"""What a job that makes no progress waits for. Pure."""
