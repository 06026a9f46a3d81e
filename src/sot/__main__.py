"""`python -m sot` is `sot`."""

from sot.cli import main

main()
