"""The SSH engine: one connection to each host."""
