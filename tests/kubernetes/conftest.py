from support.cluster import launcher
from support.kubernetes.fixtures import desk, kubernetes, kubernetes_nodes

__all__ = ["desk", "kubernetes", "kubernetes_nodes", "launcher"]
