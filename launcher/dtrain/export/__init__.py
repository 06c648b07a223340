"""A launch plan in other forms: one JSON object, scripts that a person can run."""
