"""How our image models are registered with timm: their configuration, and an entry point for each variant."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model

# The paper's peers are above this package, and registered when somebody names one: this is the one import that goes up.
PEERS = "sot.paper.peers"
PEER_PREFIXES = ("t2t_vit_", "ps_vit_", "pvt_tiny", "pvt_small", "pvt_large", "conformer_", "irpe_", "autoformer_")


def register_peers() -> None:
    """Register the models that the paper compares with, which timm lacks."""
    import_module(PEERS)


def ensure_registered(name: str) -> None:
    """Register the peers if `name`, as timm takes it, is one of theirs."""
    if name.startswith(PEER_PREFIXES):
        register_peers()


def image_cfg(first_layer: str, **settings: Any) -> dict[str, Any]:
    """timm's configuration of a model for images of ImageNet, by default of 224 px."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "fixed_input_size": True,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_layer,
        "classifier": "head",
        **settings,
    }


def register_variants(
    kind: type, variants: Mapping[str, dict[str, Any]], *, filter_fn: Any = None, out_indices: Any = 3
) -> None:
    """Register an entry point for each variant: its architecture, and what the user changes in it.

    They become functions of the module of `kind`, which has a `default_cfgs` for timm to find.
    """
    for name, architecture in variants.items():
        entry_point = _entry_point(kind, name, architecture, filter_fn, out_indices)
        setattr(sys.modules[kind.__module__], name, register_model(entry_point))


def _entry_point(kind: type, name: str, architecture: dict[str, Any], filter_fn: Any, out_indices: Any) -> Any:
    def create(pretrained: bool = False, **kwargs: Any) -> Any:
        return build_model_with_cfg(
            kind,
            name,
            pretrained,
            pretrained_filter_fn=filter_fn,
            feature_cfg={"out_indices": kwargs.pop("out_indices", out_indices), "feature_cls": "getter"},
            **{**architecture, **kwargs},
        )

    create.__name__ = create.__qualname__ = name
    create.__module__ = kind.__module__
    create.__doc__ = f"{kind.__name__} as the variant {name}; keyword arguments change its architecture."
    return create
