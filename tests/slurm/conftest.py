from support.cluster import launcher
from support.slurm import one_slurm, slurm

__all__ = ["launcher", "one_slurm", "slurm"]
