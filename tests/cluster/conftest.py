from support.cluster import hosts, launcher

__all__ = ["hosts", "launcher"]
