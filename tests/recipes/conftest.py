from support.cluster import launcher

__all__ = ["launcher"]
