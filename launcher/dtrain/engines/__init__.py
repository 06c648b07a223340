"""Engines: what starts the processes of a launch plan on their hosts."""
