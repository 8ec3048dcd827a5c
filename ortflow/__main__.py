"""`python -m ortflow` is the `ortflow` command."""

from ortflow.cli.app import main

main()
