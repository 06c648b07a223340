"""Runs on the launching machine: record, journal, logs, progress, status, and their restarts."""
