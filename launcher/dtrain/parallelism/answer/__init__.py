"""The planner's answer, as sentences and as JSON."""
