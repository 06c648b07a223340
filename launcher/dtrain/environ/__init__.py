"""Environment variables for each framework, computed only from numbers and names."""
