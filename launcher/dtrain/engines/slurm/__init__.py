"""Slurm: the launch plan as a batch job."""
