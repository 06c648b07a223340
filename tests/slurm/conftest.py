from support.slurm import one_slurm, slurm

__all__ = ["one_slurm", "slurm"]
