"""Connections to relays, the programs that report for an agent or for a command on a host."""
