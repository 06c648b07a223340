from support.cluster import hosts, launcher
from support.containers import pair

__all__ = ["hosts", "launcher", "pair"]
