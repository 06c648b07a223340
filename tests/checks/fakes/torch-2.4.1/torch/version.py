__version__ = "2.4.1+cpu"
cuda = None
hip = None
