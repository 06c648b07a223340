"""What runs in the pods of Kubernetes. Python 3.8, standard library only."""
