"""Cases of `sot bench model`: a whole model of the family, against the published formulation and against DeiT."""

from __future__ import annotations

import re
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sot.bench.cases import NUM_CLASSES, Case
from sot.bench.references import PublishedHead
from sot.models.accelerate import accelerate
from sot.models.complexity import measure_complexity
from sot.models.inference import optimize_for_inference
from sot.models.vision import SecondOrderTransformer

PUBLISHED, OURS, FOLDED = "published", "ours", "ours, folded"
PEERS = {
    "sot_tiny": "deit_tiny_patch16_224",
    "sot_small": "deit_small_patch16_224",
    "sot_base": "deit_base_patch16_224",
}
RENAMED = (("^patch_embed.proj.", "embedding."), ("^head.pool.norm.", "head."), ("^head.pool.", "head."))


class PublishedDenseLayer(nn.Module):
    """BN-ReLU-1×1, BN-ReLU-3×3, and a copy of everything so far beside it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 32, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(32), nn.Conv2d(32, 16, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(new)))], 1)


def published_stage(channels: int) -> list[nn.Module]:
    """Six dense layers, then BN, 1×1 convolution and average pooling in this order."""
    block, transition = nn.Sequential(), nn.Sequential()
    for index in range(6):
        block.add_module(f"denselayer{index + 1}", PublishedDenseLayer(channels + 16 * index))
    transition.add_module("norm", nn.BatchNorm2d(channels + 96))
    transition.add_module("conv", nn.Conv2d(channels + 96, 128, 1, bias=False))
    transition.add_module("pool", nn.AvgPool2d(2))
    return [block, transition]


class PublishedEmbedding(nn.Module):
    """Image to word tokens `(batch, tokens, dim)`, channels first throughout."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential(*published_stage(64), *published_stage(128), *published_stage(128))
        self.out = nn.Conv2d(128, dim, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.out(self.stages(self.stem(image.contiguous()))).flatten(2).transpose(1, 2)


class PublishedAttention(nn.Module):
    """`softmax(QKᵀ / √d) V`, each step by itself."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv[0], qkv[1], qkv[2]  # (batch, heads, tokens, dim / heads)
        weights = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1)
        return self.proj((weights @ value).transpose(1, 2).reshape(batch, tokens, dim))


class PublishedBlock(nn.Module):
    """Attention and MLP, each after a layer norm and beside a shortcut."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), PublishedAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, hidden), "fc2": nn.Linear(hidden, dim)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class PublishedModel(nn.Module):
    """A model of the family for 224 px with its densenet embedding, as published, with the weights of ours."""

    def __init__(self, ours: SecondOrderTransformer) -> None:
        super().__init__()
        dim, config, first = ours.embed_dim, ours.head.config, ours.blocks[0]
        self.embedding = PublishedEmbedding(dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Buffer(ours.pos_embed, persistent=False)
        hidden = first.mlp.fc1.out_features
        self.blocks = nn.Sequential(*(PublishedBlock(dim, first.attn.num_heads, hidden) for _ in ours.blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = PublishedHead(dim, ours.num_classes, config.heads, config.left_dim, center=False)
        self.load_state_dict(published_names(ours.state_dict()))

    def forward(self, image: Tensor) -> Tensor:
        words = self.embedding(image)
        tokens = torch.cat([self.cls_token.expand(len(words), -1, -1), words], 1) + self.pos_embed
        tokens = self.norm(self.blocks(tokens))
        return self.head(tokens[:, 0], tokens[:, 1:])


def published_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of `PublishedModel`."""
    result = {}
    for name, value in state.items():
        for ours, theirs in RENAMED:
            name = re.sub(ours, theirs, name)
        result[name] = value
    return result


def forward_alone(model: nn.Module, image: Tensor) -> Callable[[], Tensor]:
    """The logits of a model in eval mode, without gradients."""
    model.eval()

    def run() -> Tensor:
        with torch.inference_mode():
            return model(image)

    return run


def training_step(model: nn.Module, image: Tensor, target: Tensor) -> Callable[[], None]:
    """Forward, backward and a step of AdamW."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def run() -> None:
        torch.autograd.backward(F.cross_entropy(model(image), target))
        optimizer.step()
        optimizer.zero_grad()

    return run


def model_cases(name: str = "sot_tiny", batch: int = 16, train_batch: int = 8) -> list[Case]:
    """Eval beside the published formulation and beside DeiT, and a step of training; ours is accelerated."""
    if name not in PEERS:
        raise ValueError(f"unknown model {name!r}; accepted: {', '.join(PEERS)}")
    ours, peer = accelerate(timm.create_model(name)), PEERS[name]
    image = torch.randn(batch, 3, 224, 224)
    forwards = {
        PUBLISHED: forward_alone(PublishedModel(ours), image),
        OURS: forward_alone(ours, image),
        FOLDED: forward_alone(optimize_for_inference(ours), image),
    }
    peers = {peer: forward_alone(timm.create_model(peer), image), OURS: forwards[OURS], FOLDED: forwards[FOLDED]}
    work, peer_work = (measure_complexity(timm.create_model(each), (3, 224, 224)).all_macs for each in (name, peer))
    notes = dict.fromkeys((OURS, FOLDED), f"{work / peer_work:.2f} × the multiply-adds")
    data = torch.randn(train_batch, 3, 224, 224), torch.randint(NUM_CLASSES, (train_batch,))
    learner = accelerate(timm.create_model(name))
    steps = {PUBLISHED: training_step(PublishedModel(learner), *data), OURS: training_step(learner, *data)}

    return [
        Case(f"{name}: forward, batch {batch}", forwards, PUBLISHED),
        Case(f"{name} beside {peer}, batch {batch}", peers, peer, notes),
        Case(f"{name}: training step, batch {train_batch}", steps, PUBLISHED),
    ]
