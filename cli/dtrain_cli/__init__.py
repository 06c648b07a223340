"""The `dtrain` command."""
