"""A Kubernetes for tests: a real HTTPS API, and controllers and kubelets that run what it holds.

    from support.kubernetes.fixtures import kubernetes, kubernetes_nodes
    __all__ = ["kubernetes", "kubernetes_nodes"]

    def test_runs(kubernetes):
        kubernetes.kubectl("apply", "-f", "jobset.yaml")
        kubernetes.wait_for("jobsets", "train", "Completed")

A pod runs as written, in network namespaces: its command, variables, volumes and names. What is not
real: there are no images (a container has this machine's programs and the tests' Python), a pod has
the address of its node, and a node runs one pod at a time.
"""
