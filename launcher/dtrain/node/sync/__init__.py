"""The receiver of the working folder. Python 3.8, standard library only."""
