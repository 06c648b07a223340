"""`dtrain check` across hosts in network namespaces."""

from support.cluster import hosts, launcher

__all__ = ["hosts", "launcher"]
