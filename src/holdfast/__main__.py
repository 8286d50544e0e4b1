"""Run the command line as `python -m holdfast`."""

from holdfast.cli.main import main

main()
