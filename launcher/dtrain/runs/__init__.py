"""The record, journal, logs and progress of a run on the launching machine, and its restarts."""
