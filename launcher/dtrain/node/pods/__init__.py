"""What runs on the login nodes and the machines of Slurm. Python 3.8, standard library only."""
