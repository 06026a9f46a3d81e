"""Train sot_7 on CIFAR-10 with a head that might bear corrupted images, for docs/results-corruptions.md.

python docs/results/robust/robust.py NAME SEED --data cifar10 --out RUN
python docs/results/robust/robust.py NAME evaluate RUN --data cifar10 --corruptions common --severities 1 --samples 2000

An evaluation of the default head on a folder NAME leaves RUN/passes-NAME.pt for spectrum.py and refit.py: what the head
read of every image.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm.data
import torch
from torch import Tensor, nn

import sot.core.normalizers as normalizers
import sot.evaluation.evaluate as evaluate
import sot.training.image_model as image_model
import sot.training.train_images as train_images
from sot.cli.main import main
from sot.ops.svpn.torch import decompose_by_gram, pull_back

sys.path.append(str(Path(__file__).parent.parent))
from whitened import start_whitened

EXACT = "norm=svpn,exponent=0.25"
HEADS = {
    "class": "fusion=class",
    "default": EXACT,
    "half": "norm=svpn,exponent=0.5",
    "center": f"{EXACT},center=true",
    "wide": f"{EXACT},left_dim=24,right_dim=24",
    "average": f"{EXACT},average=true",
    "floor": EXACT,
    "unit": EXACT,
    "class-blur": "fusion=class",
    "default-blur": EXACT,
    "whiten": EXACT,
}
own_trainer = train_images.make_trainer
FLOOR, BLUR = 0.1, 0.5  # share of λ₁; chance of timm's blur, of σ 0.1 to 2 pixels


class Floored(torch.autograd.Function):
    """`λ (λ² + (FLOOR λ₁)²)^((α-1)/2)` in place of λ^α: values far below the floor grow no more than it does."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, exponent: float) -> Tensor:
        left, values, right = decompose_by_gram(matrix)
        floor = FLOOR * values.amax(-1, keepdim=True)
        smooth = (values.square() + floor.square()).clamp_min(1e-30)
        ctx.save_for_backward(left, values, right, floor, smooth)
        ctx.exponent = exponent
        return (left * (values * smooth.pow((exponent - 1) / 2)).unsqueeze(-2)) @ right

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        left, values, right, floor, smooth = ctx.saved_tensors
        found = pull_back(grad, (left, values, right), ctx.exponent, FLOOR, False)
        along = (left * (grad @ right.mT)).sum(-2)  # uᵢᵀ G vᵢ: the floor moves with λ₁
        slope = values * (ctx.exponent - 1) * smooth.pow((ctx.exponent - 3) / 2) * floor * FLOOR
        largest = values.argmax(-1)[:, None, None]
        first_left, first_right = left.take_along_dim(largest, 2), right.take_along_dim(largest, 1)
        return found + (along * slope).sum(-1)[:, None, None] * first_left @ first_right, None


class FlooredNorm(nn.Module):
    """Exact svPN with a floor."""

    def forward(self, matrix: Tensor) -> Tensor:
        return Floored.apply(matrix.flatten(0, 1), 0.25).view_as(matrix)


class UnitNorm(normalizers.SingularValuePowerNorm):
    """Exact svPN of matrices of Frobenius length 1: what scales all singular values alike is not seen."""

    def forward(self, matrix: Tensor) -> Tensor:
        return super().forward(matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12))


def change(name: str) -> None:
    """Put the norm or the augmentation of this name in place of the library's."""
    if name == "floor":
        normalizers.NORMS["svpn"] = lambda settings: FlooredNorm()
    if name == "unit":
        normalizers.NORMS["svpn"] = lambda settings: UnitNorm(settings.exponent)
    if name == "whiten":
        train_images.IMAGES = replace(train_images.IMAGES, make_trainer=make_whitened_trainer)
    if name.endswith("-blur"):
        blurred = functools.partial(timm.data.create_transform, gaussian_blur_prob=BLUR)
        image_model.timm.data.create_transform = blurred


def make_whitened_trainer(*args: Any) -> Any:
    """A trainer whose projections start from whitened directions of the words of its first 500 images."""
    trainer, seen = own_trainer(*args), []
    model = trainer.model.eval()
    hook = model.classifier.pool.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for images in torch.stack([trainer.train_dataset[row]["pixel_values"] for row in range(500)]).split(100):
            model(images)
    hook.remove()
    start_whitened(model.classifier.pool.projection, torch.cat(seen).flatten(0, 1))
    model.train()
    return trainer


def record(file: Path) -> None:
    """Keep class tokens, cross-covariances and labels of every pass over the images: clean, then each corruption."""
    own, passes = evaluate._logits_of, []

    def recorded(model: Any, *rest: Any) -> Any:
        head, classes, matrices = model.classifier, [], []
        hooks = [head.register_forward_pre_hook(lambda module, inputs: classes.append(inputs[0]))]
        hooks += [head.pool.norm.register_forward_pre_hook(lambda module, inputs: matrices.append(inputs[0]))]
        logits, labels = own(model, *rest)
        for hook in hooks:
            hook.remove()
        passes.append((torch.cat(classes), torch.cat(matrices), torch.as_tensor(labels)))
        torch.save(passes, file)
        return logits, labels

    evaluate._logits_of = recorded


if __name__ == "__main__":
    name, what, *options = sys.argv[1:]
    change(name)
    training = ["train", "--model", "sot_7", "--recipe", "ablation_cpu", "--head", HEADS[name], "--set", f"seed={what}"]
    training += ["--set", "evaluate_every=8", "--logger", "none"]
    if (name, what) == ("default", "evaluate"):
        data = Path(options[options.index("--data") + 1])
        record(Path(options[0]) / f"passes-{data.name}.pt")
    sys.argv = ["sot", *(["evaluate"] if what == "evaluate" else training), *options]
    main()
