"""Conformer: a ResNet and a transformer side by side, coupled in every layer (Peng et al., ICCV 2021).

Both branches classify: their logits are added. Parameter names and shapes are those of the authors' checkpoints.
"""

# Annotations stay objects here: torch.fx writes them into the code it makes.
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import LayerNorm, calculate_drop_path_rates, global_pool_nlc, trunc_normal_
from timm.models import generate_default_cfgs
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from sot.models.embedding.token_embed import TokenEmbed
from sot.models.variants import image_cfg, register_variants
from sot.paper.peers.coupling import Bottleneck, CoupledBlock
from sot.paper.peers.staged import StagedBackbone

__all__ = ["Conformer"]

DEPTH = 12
STAGE_ENDS = {4: 4, 8: 8, DEPTH - 1: 16, DEPTH: 32}  # layers, and the strides of their maps
STEM_WIDTH = 64


def stage_of(layer: int) -> int:
    """Which of three stages of four layers a layer is in, counted from 0; layers are counted from 1."""
    return (layer - 1) // 4


def stage_maps(widths: list[int]) -> list[dict[str, Any]]:
    """What timm wants to know of the maps that are features: `widths` are the channels of the stages."""
    return [
        {"module": f"conv_trans_{end}", "num_chs": widths[stage_of(end)], "reduction": reduction}
        for end, reduction in STAGE_ENDS.items()
    ]


class Conformer(StagedBackbone):
    """Conformer: twelve layers of two branches, for images whose sides are multiples of 16.

    `forward_features` returns the tokens of the transformer, class token first, and the map of the convolutions;
    `forward` the sum of both branches' logits; `forward_branches` both, so that each can be trained by a loss of its
    own, as the authors do (they take the mean of two cross-entropies).

    Args:
        channel_ratio: How wide the convolution branch is: 64, 128 and 256 times this.
        global_pool: Of the tokens: 'token' (the class token), 'avg' and timm's other poolings of the words.
    """

    NORM = "trans_norm"
    CLASSIFIERS: ClassVar[dict[str, str]] = {"trans_cls_head": "embed_dim", "conv_cls_head": "map_dim"}

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        channel_ratio: float = 1,
        embed_dim: int = 384,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        widths = [int(channel_ratio * width) for width in (64, 128, 256)]
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.embed_dim = embed_dim
        self.map_dim = widths[-1]
        self.num_features = self.head_hidden_size = embed_dim + self.map_dim
        self.num_prefix_tokens = 1
        self.feature_info = stage_maps(widths)

        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.trans_norm: nn.Module = LayerNorm(embed_dim, eps=1e-5)
        self.trans_cls_head: nn.Module = nn.Identity()
        self.conv_cls_head: nn.Module = nn.Identity()
        transformer = partial(
            Block,
            embed_dim,
            num_heads,
            mlp_ratio,
            qkv_bias=True,
            proj_drop=proj_drop_rate,
            attn_drop=attn_drop_rate,
            norm_layer=LayerNorm,
        )
        drop_paths = calculate_drop_path_rates(drop_path_rate, DEPTH)
        self._add_stem(in_chans)
        self._add_layers(widths, (transformer(drop_path=rate) for rate in drop_paths))
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        self.init_weights()
        self.to(device=device, dtype=dtype)

    def _add_stem(self, in_chans: int) -> None:
        """That of a ResNet, to a map at stride 4 which both branches start from."""
        self.conv1: Any = nn.Conv2d(in_chans, STEM_WIDTH, 7, 2, 3, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(STEM_WIDTH)
        self.act1: nn.Module = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1)

    def _add_layers(self, widths: list[int], transformers: Iterator[Block]) -> None:
        """The first layer, whose branches are apart, and the coupled ones: stages of four at strides 4, 8 and 16."""
        self.conv_1 = Bottleneck(STEM_WIDTH, widths[0], project=True)
        self.trans_patch_conv = nn.Conv2d(STEM_WIDTH, self.embed_dim, 4, 4)
        self.trans_1 = next(transformers)
        for layer, transformer in enumerate(transformers, start=2):
            stage, before = stage_of(layer), stage_of(layer - 1)
            block = CoupledBlock(
                widths[before],
                widths[stage],
                token_stride=4 >> stage,
                stride=1 if stage == before else 2,
                is_last=layer == DEPTH,
                transformer=transformer,
                dim=self.embed_dim,
            )
            setattr(self, f"conv_trans_{layer}", block)

    def init_weights(self) -> None:
        """Truncated normal of std 0.02 for linear layers and class token, He's for convolutions."""
        trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise rates."""
        first = r"^conv1|^bn1|^conv_1|^trans_1|^trans_patch_conv|^cls_token"
        return {"stem": first, "blocks": [(r"^conv_trans_(\d+)", None), (r"^trans_norm", (99999,))]}

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        """The linear layers of the tokens and of the map."""
        return self.trans_cls_head, self.conv_cls_head

    def replace_embedding(self, kind: str) -> None:
        """Another network from the image to the map of both branches at stride 4: the paper's "+ours"."""
        channels, place = self.conv1.in_channels, self.conv1.weight
        embedding = TokenEmbed(kind, None, 4, channels, STEM_WIDTH, output_fmt="NCHW")
        self.conv1 = embedding.to(place)
        self.bn1, self.act1, self.maxpool = nn.Identity(), nn.Identity(), nn.Identity()

    def stages(self, x: Tensor, norm: bool = False) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """Tokens `(batch, 1 + words, embed_dim)`, normalised, and the last of the maps, which no norm is for.

        The maps are those after the last layer of each stride; the last is `(batch, map_dim, H/32, W/32)`.
        """
        base = self.maxpool(self.act1(self.bn1(self.conv1(x))))  # (batch, 64, H/4, W/4)
        x, _ = self.conv_1(base)
        words = self.trans_patch_conv(base).flatten(2).transpose(1, 2)
        tokens = self.trans_1(torch.cat([self.cls_token.expand(words.shape[0], -1, -1), words], dim=1))
        maps = []
        for layer in range(2, DEPTH + 1):
            x, tokens = self.run_block(getattr(self, f"conv_trans_{layer}"), x, tokens)
            if layer in STAGE_ENDS:
                maps.append(x)
        return (self.trans_norm(tokens), x), maps

    def pool(self, features: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What the two linear layers read."""
        tokens = global_pool_nlc(features[0], self.global_pool, self.num_prefix_tokens)
        return self.head_drop(tokens), self.head_drop(features[1].mean((2, 3)))

    def forward_head(self, features: tuple[Tensor, Tensor], pre_logits: bool = False) -> Tensor:
        """Sum of both branches' logits, or what their linear layers read, side by side."""
        tokens, x = self.pool(features)
        if pre_logits or self.num_classes == 0:
            return torch.cat([tokens, x], dim=1)
        return self.trans_cls_head(tokens) + self.conv_cls_head(x)

    def forward_branches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the transformer and of the convolutions."""
        tokens, pooled = self.pool(self.forward_features(x))
        return self.trans_cls_head(tokens), self.conv_cls_head(pooled)


VARIANTS: dict[str, dict[str, Any]] = {"conformer_ti": {}}  # 23.5 M parameters, 5.2 G multiply-adds
default_cfgs = generate_default_cfgs(
    {"conformer_ti": image_cfg("conv1", fixed_input_size=False, classifier=("trans_cls_head", "conv_cls_head"))}
)
register_variants(Conformer, VARIANTS, out_indices=tuple(range(len(STAGE_ENDS))))
