"""Asks all hosts at once: for the facts of a check, and for the state of a run."""
