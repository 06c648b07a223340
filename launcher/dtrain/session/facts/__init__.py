"""Gathers facts from all hosts at once, for a check."""
