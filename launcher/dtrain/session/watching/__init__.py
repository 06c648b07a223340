"""Watches the workers of one attempt: what they report, where they wait, why they failed."""
