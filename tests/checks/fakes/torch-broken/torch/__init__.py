"""Fails as torch does where the C library is too old."""

raise ImportError("/lib64/libc.so.6: version `GLIBC_2.28' not found (required by libtorch.so)")
