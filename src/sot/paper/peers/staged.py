"""What timm asks of a backbone whose stages give maps, for the two that are no VisionTransformer."""

# Annotations stay objects here: torch.fx writes them into the code it makes.
from collections.abc import Callable
from typing import Any, ClassVar

from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn


class StagedBackbone(nn.Module):
    """Features of chosen stages, pruning, checkpointing and new classifiers.

    A subclass has `stages`, `forward_head` and an entry of `feature_info` for each stage.
    """

    NORM: ClassVar[str]  # name of the norm after the last stage
    CLASSIFIERS: ClassVar[dict[str, str]]  # names of the linear layers, and of the attributes with their widths
    num_classes: int
    global_pool: str
    feature_info: list[dict[str, Any]]
    cls_token: nn.Parameter
    forward_head: Callable[..., Tensor]
    grad_checkpointing = False

    def stages(self, x: Tensor, norm: bool = False) -> tuple[Any, list[Tensor]]:
        """What `forward_head` reads, and the map of each stage; `norm` asks for the norm of the last map, if any."""
        raise NotImplementedError

    def run_block(self, block: nn.Module, *inputs: Any) -> Any:
        """A block, computed again in the backward pass if that is asked for."""
        return checkpoint(block, *inputs) if self.grad_checkpointing else block(*inputs)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute blocks again in the backward pass instead of keeping what they computed."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """As the authors: positions are decayed."""
        return {"cls_token"}

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New linear layers, and another pooling of the tokens if one is named."""
        self.num_classes = num_classes
        self.global_pool = self.global_pool if global_pool is None else global_pool
        for name, width in self.CLASSIFIERS.items():
            head = nn.Linear(getattr(self, width), num_classes) if num_classes > 0 else nn.Identity()
            setattr(self, name, head.to(self.cls_token).train(self.training))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Features, and the maps of the stages chosen by `indices`; `norm` is that of the last stage alone."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be NCHW, got {output_fmt}")
        chosen, _ = feature_take_indices(len(self.feature_info), indices)
        features, maps = self.stages(x, norm)
        intermediates = [maps[i] for i in chosen]
        return intermediates if intermediates_only else (features, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the norm or classifiers where features alone are wanted; all stages stay."""
        chosen, _ = feature_take_indices(len(self.feature_info), indices)
        if prune_norm:
            setattr(self, self.NORM, nn.Identity())
        if prune_head:
            self.reset_classifier(0, "")
        return chosen

    def forward_features(self, x: Tensor) -> Any:
        """What `forward_head` reads."""
        return self.stages(x)[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))
