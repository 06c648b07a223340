from support.cluster import launcher
from support.slurm import one_slurm, slurm, write_job

__all__ = ["launcher", "one_slurm", "slurm", "write_job"]
