"""Heads on a frozen backbone: tokens are computed once, then every head is trained on them.

What a name needs is loaded when it is first asked for: the names of the heads need no torch.
"""

from typing import TYPE_CHECKING

from sot.lazy import lazily

if TYPE_CHECKING:
    from sot.probe.budget import Budget as Budget
    from sot.probe.cache import cache_features as cache_features
    from sot.probe.compare import compare_heads as compare_heads
    from sot.probe.features import Features as Features
    from sot.probe.frozen import Data as Data
    from sot.probe.frozen import FrozenBackbone as FrozenBackbone
    from sot.probe.frozen import open_backbone as open_backbone
    from sot.probe.frozen import read_images as read_images
    from sot.probe.frozen import read_sounds as read_sounds
    from sot.probe.frozen import read_texts as read_texts
    from sot.probe.frozen import with_head as with_head
    from sot.probe.heads import choose_heads as choose_heads
    from sot.probe.names import HEADS as HEADS
    from sot.probe.names import check_names as check_names
    from sot.probe.outcome import ProbeComparison as ProbeComparison

_HOMES = {
    **{"Budget": "budget", "Features": "features", "ProbeComparison": "outcome"},
    **{"cache_features": "cache", "choose_heads": "heads", "compare_heads": "compare"},
    **dict.fromkeys(("HEADS", "check_names"), "names"),
    **dict.fromkeys(("Data", "FrozenBackbone", "open_backbone", "with_head"), "frozen"),
    **dict.fromkeys(("read_images", "read_sounds", "read_texts"), "frozen"),
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
