"""The command line with sharding on processes without an accelerator, which torch can do and accelerate leaves out."""

import os

import torch
from accelerate import DistributedType, PartialState

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
torch.distributed.init_process_group("gloo")
PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)

from sot.cli.main import main

main()
