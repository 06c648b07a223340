"""dtrain: launch multi-node training over SSH from one YAML file."""

__version__ = "0.1.0"
