__version__ = "2.13.0+cpu"
cuda = None
hip = None
