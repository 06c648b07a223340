"""The launch plan: processes on hosts, their environments, and the output of a dry run. Pure."""
