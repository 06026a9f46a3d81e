"""What `sot bench` measures: the library beside the published formulae and torch's own building blocks."""
