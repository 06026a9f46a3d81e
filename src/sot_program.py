"""What the console script `sot` starts. Outside of the package, so that `sot` can see that a program imports it."""

from sot.cli.main import main as main
