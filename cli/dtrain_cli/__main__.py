"""`python -m dtrain_cli`: for use when the `dtrain` script is not on PATH."""

from dtrain_cli.app import main

main()
