"""Published weights as key lists have them: repeated layers are written once."""

import re

import torch
from peer_checks import published_shapes


def published_weights(name, device="meta"):
    """Tensors of the published names and shapes; `blocks.{0-6}.` stands for seven layers."""
    weights = {}
    for pattern, shape in published_shapes(name).items():
        repeated = re.search(r"\{0-(\d+)\}", pattern)
        for index in range(int(repeated[1]) + 1 if repeated else 1):
            key = pattern.replace(repeated[0], str(index)) if repeated else pattern
            weights[key] = torch.zeros(shape, device=device)
    return weights
