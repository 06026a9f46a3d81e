"""`python -m sot` is `sot`."""

from sot.cli.main import main

main()
