"""The environments that frameworks expect, computed from numbers and names alone."""
