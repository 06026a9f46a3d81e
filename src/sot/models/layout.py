"""Where an image backbone has its tokens: found once, by a pass on the meta device, and saved with the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from timm.layers import RmsNorm, RmsNormFp32, SimpleNorm, SimpleNormFp32
from torch import Tensor, nn

from sot.models.tokens import FETCH, MAP_NORMS, REFUSED, WITHOUT_NORM, as_branches

SEQUENCE_NORMS = (nn.LayerNorm, nn.RMSNorm, RmsNorm, RmsNormFp32, SimpleNorm, SimpleNormFp32)
NORM_NAMES = ("fc_norm", "head.norm", "layernorm", "norm", "pooler.layernorm", "merger.norm", "post_layernorm")
CLASS_TOKENS = ("cls_token", "class_embedding")  # of CLIP and its kin


@dataclass(frozen=True)
class Layout:
    """Where the tokens are in what an image backbone returns, found once and saved with the model.

    `norm` names the backbone's own normalisation that its features have not passed yet; `needs_norm` says that there is
    none, before or after them, so that one belongs in front of the head; `unused` names what is left of its classifier,
    which would otherwise sit in the model without a gradient; `branches` are the layouts of further branches.
    """

    dim: int
    format: str = "NLC"
    has_class_token: bool = False
    num_prefix_tokens: int = 0
    norm: str | None = None
    unused: list[str] = field(default_factory=list)
    needs_norm: bool = False
    branches: list[Layout] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for a configuration file."""
        return {name: value for name, value in asdict(self).items() if value or name != "branches"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """The inverse of `to_dict`; unknown fields are refused."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown or "dim" not in values:
            wrong = f"unknown {', '.join(map(repr, unknown))}" if unknown else "it lacks 'dim'"
            raise ValueError(f"the layout of the model is damaged: {wrong}; accepted: {', '.join(known)}")
        prefix = values.get("num_prefix_tokens", 0)
        if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0:
            raise ValueError(f"the layout of the model is damaged: num_prefix_tokens is {prefix!r}, not a number >= 0")
        if not isinstance(values.get("norm"), str | None):
            raise ValueError(f"the layout of the model is damaged: norm is {values['norm']!r}, not a name")
        return cls(**{**values, "branches": [cls.from_dict(branch) for branch in values.get("branches", [])]})


# --- finding it ----------------------------------------------------------------------------------------------


def find_layout(model: nn.Module, features: Callable[[], Any], format: str | None, num_prefix: int | None) -> Layout:
    """The layout of `features()`, a forward pass of `model` with gradients; on the meta device it costs nothing."""
    output, called = watch(model, features)
    parts = as_branches(output) if type(model).__name__ in FETCH else (output,)
    for part in parts:
        check_features(model, part)
    idle = set.intersection(*(idle_parameters(model, part) for part in parts))
    first, *others = (branch_layout(model, part, idle, called, format, num_prefix) for part in parts)
    pending = tuple(f"{layout.norm}." for layout in (first, *others) if layout.norm is not None)
    unused = unused_modules(model, {parameter for parameter in idle if not parameter.startswith(pending)})
    return replace(first, unused=unused, branches=others)


def watch(model: nn.Module, features: Callable[[], Any]) -> tuple[Any, set[nn.Module]]:
    """What a forward pass returns, and the modules that it calls."""
    called: set[nn.Module] = set()
    hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in model.modules()]
    with torch.enable_grad():  # the graph tells which parameters take part, also for callers who want no gradient
        output = features()
    for hook in hooks:
        hook.remove()
    return output, called


def check_features(model: nn.Module, part: Any) -> None:
    """Raise ValueError unless a branch of two pictures is tokens or a map."""
    if isinstance(part, Tensor) and part.ndim in (3, 4) and part.shape[0] == 2:
        return
    name, shape = type(model).__name__, tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
    why = REFUSED.get(name, f"its features are {shape}, not tokens (batch, tokens, dim) or a map")
    raise ValueError(f"{name} has no word tokens to pool: {why}")


def branch_layout(
    model: nn.Module, output: Tensor, idle: set[str], called: set[nn.Module], format: str | None, num_prefix: int | None
) -> Layout:
    """The layout of what one branch of the model returned."""
    name, sequence = type(model).__name__, output.ndim == 3
    active = [(name, parameter) for name, parameter in model.named_parameters() if name not in idle]
    class_tokens = [parameter for name, parameter in active if name.rpartition(".")[2].startswith(CLASS_TOKENS)]
    if num_prefix is None:  # CaiT, XCiT, PiT and others do not say: count what their class token parameter holds
        num_prefix = class_tokens[-1].shape[1] if class_tokens else 0
    if sequence and output.shape[1] <= num_prefix:
        raise ValueError(f"{name} has no word tokens to pool: it returns its class token alone")
    format = "NLC" if sequence else format or "NCHW"
    dim = output.shape[1] if format == "NCHW" else output.shape[-1]
    norm = pending_norm(model, dim, idle, called)
    switched_off = sequence and isinstance(getattr(model, "norm", None), nn.Identity)  # some of EVA's, on purpose
    return Layout(
        dim=dim,
        format=format,
        has_class_token=sequence and bool(class_tokens),
        num_prefix_tokens=num_prefix if sequence else 0,
        norm=norm,
        needs_norm=norm is None and (name in WITHOUT_NORM or switched_off),
    )


def pending_norm(model: nn.Module, dim: int, idle: set[str], called: set[nn.Module]) -> str | None:
    """Name of the norm that the backbone would apply next: over `dim`, without part in the features so far."""
    modules = dict(model.named_modules())
    for name in NORM_NAMES:
        norm: Any = modules.get(name)
        if not isinstance(norm, SEQUENCE_NORMS + MAP_NORMS) or tuple(norm.normalized_shape) != (dim,):
            continue
        weights = {f"{name}.{weight}" for weight, _ in norm.named_parameters()}
        if weights <= idle if weights else norm not in called:
            return name
    return None


def idle_parameters(model: nn.Module, output: Tensor) -> set[str]:
    """Names of the trainable parameters that `output` does not depend on."""
    seen: set[Any] = {None}
    waiting: list[Any] = [output.grad_fn]
    while waiting:  # read off its graph: no backward pass, which some devices lack
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    used = {node.variable for node in seen if hasattr(node, "variable")}  # of the leaves
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in used}


def unused_modules(model: nn.Module, idle: set[str]) -> list[str]:
    """Names of the largest modules (or single parameters) that hold idle parameters only."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = [f"{name}.{inner}" for inner, _ in module.named_parameters()]
        covered = any(name.startswith(f"{outer}.") for outer in found)
        if name and inside and not covered and all(parameter in idle for parameter in inside):
            found.append(name)
    return sorted(found + [name for name in idle if not any(name.startswith(f"{outer}.") for outer in found)])


# --- what is not needed --------------------------------------------------------------------------------------


def apply_layout(model: nn.Module, layout: Layout) -> None:
    """Replace unused modules by nothing; a single unused parameter stays, frozen. Norms have to be there."""
    for each in (layout, *layout.branches):
        model.get_submodule(each.norm or "")
    for name in layout.unused:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(getattr(owner, child), nn.Parameter):
            getattr(owner, child).requires_grad_(False)
        else:
            setattr(owner, child, nn.Identity())
    teach_buffers(model)


def teach_buffers(model: nn.Module) -> None:
    """Give modules of timm that forget it a way to fill their unsaved buffers after loading, as the others have."""
    for module in model.modules():
        if type(module).__name__ == "SwinTransformerV2Block" and not hasattr(module, "init_non_persistent_buffers"):
            vars(module)["init_non_persistent_buffers"] = partial(fill_attention_mask, module)


def fill_attention_mask(block: Any) -> None:
    """Swin v2's mask of shifted windows."""
    if block.attn_mask is not None:
        block.attn_mask = block.get_attn_mask(device=block.attn_mask.device, dtype=block.attn_mask.dtype)
