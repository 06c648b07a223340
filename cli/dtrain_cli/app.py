"""The command line: verbs, the error boundary, exit codes."""


def main() -> None:
    """Entry point of the `dtrain` command."""
