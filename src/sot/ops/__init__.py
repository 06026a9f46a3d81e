"""How it is computed: operators `torch.ops.sot.*`, one folder for each, one file for each backend."""

from sot.ops.registry import use as use
