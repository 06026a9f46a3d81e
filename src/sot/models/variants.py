"""How our image models are registered with timm: their configuration, and building one of its variants."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg

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


def build_variant(
    kind: type,
    variant: str,
    pretrained: bool,
    architecture: dict[str, Any],
    kwargs: dict[str, Any],
    *,
    filter_fn: Any = None,
    out_indices: Any = 3,
) -> Any:
    """A registered variant: its architecture, and what the user changes in it."""
    return build_model_with_cfg(
        kind,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", out_indices), "feature_cls": "getter"},
        **{**architecture, **kwargs},
    )
