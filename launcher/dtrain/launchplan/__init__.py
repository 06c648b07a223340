"""What a launch starts: processes on hosts, their environments, the forms of a dry run. Pure."""
