"""The Kubernetes engine: a JobSet or a TrainJob with one pod for each host."""
