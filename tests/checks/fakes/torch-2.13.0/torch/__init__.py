"""As much of torch as `dtrain check` looks at."""

from types import SimpleNamespace

from torch import version

__version__ = version.__version__
cuda = SimpleNamespace(device_count=lambda: 0, is_available=lambda: False)
distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: False)
