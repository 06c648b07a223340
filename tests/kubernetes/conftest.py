from support.cluster import launcher
from support.kubernetes.fixtures import kubernetes, kubernetes_nodes

__all__ = ["kubernetes", "kubernetes_nodes", "launcher"]
