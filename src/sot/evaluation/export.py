"""Export a trained model to ONNX or to a torch program, check it at other sizes, and run what was exported."""

from __future__ import annotations

import logging
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import Tensor

from sot.core.normalizers import MatrixPowerNorm, SingularValuePowerNorm
from sot.data.images import check_processor
from sot.data.sound_sets import encode_sounds
from sot.errors import SettingError
from sot.evaluation.formats import FORMATS, export_target, exported_folder
from sot.extras import install_hint
from sot.files import one_line
from sot.lock import only_writer
from sot.models.audio import exported_inputs
from sot.models.branched import heads_of
from sot.models.folder import load_config, load_model, load_processor
from sot.ops.svpn.export import ROOTS

SIZES = ((1, 5), (2, 17), (5, 48))  # samples, and tokens of a text, at which an export is checked
BOUND_TO_LENGTHS = ("wavlm", "sew", "sew-d")  # backbones whose graphs hold for some numbers of clips or samples only
SECONDS_OF_SOUND = 0.05  # in place of a token
TOLERANCE = 1e-3  # of the largest logit
RUNS_CODE = ("custom_obj", "opaque_obj")  # what a torch program may hold that is unpickled


@dataclass(frozen=True)
class Export:
    """Where a model was written, and how far its logits are from the original's at each number of samples."""

    file: Path
    differences: dict[int, float]


def export_model(folder: Path, to: str, out: Path | None = None) -> Export:
    """Write the model of `folder` for onnxruntime (`onnx`) or torch (`torch`), with what prediction needs beside it."""
    file = export_target(folder, to, out)
    model, processor = load_model(folder)
    write = _write_onnx if to == "onnx" else _write_torch
    file.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(file.parent), _beside(file) as unfinished:
        model.config.save_pretrained(unfinished)
        processor.save_pretrained(unfinished)
        apart = file.parent.resolve() != folder.resolve()  # beside the model its own configuration stays
        if apart:
            _check_neighbours(unfinished, file)
        with _able(model):
            with _quiet():
                write(model, sample_inputs(model, processor, 3, 9), unfinished / file.name)
            differences = _compare(model, processor, unfinished / file.name)
        for part in unfinished.iterdir():
            if apart or part.name.startswith(file.name):
                os.replace(part, file.parent / part.name)
    return Export(file, differences)


@contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """A folder for what becomes of `file`, always of the same name: what a killed export left of it is removed."""
    folder = file.parent / f".export-{file.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_neighbours(unfinished: Path, file: Path) -> None:
    """Raise ValueError if another model needs the configuration or processor that would be replaced."""
    there = {part: file.parent / part.name for part in unfinished.iterdir()}
    changed = [old.name for part, old in there.items() if old.exists() and old.read_bytes() != part.read_bytes()]
    endings = (*FORMATS.values(), ".safetensors", ".bin")
    others = [path for path in file.parent.glob("[!.]*") if path.suffix in endings and path != file]
    if changed and (others or not file.exists()):
        raise ValueError(f"{file.parent} holds the {changed[0]} of another model: export to a folder of its own")


def sample_inputs(model: Any, processor: Any, batch: int, length: int) -> dict[str, Tensor]:
    """Random images or sounds, or random texts of `length` tokens of which the last is shorter."""
    generator = torch.Generator().manual_seed(batch)
    if model.config.modality == "image":
        shape = check_processor(processor, "the model")
        return {"pixel_values": torch.randn(batch, *shape, generator=generator)}
    if model.config.modality == "audio":
        count = round(length * SECONDS_OF_SOUND * processor.sampling_rate)
        sounds = torch.randn(batch, count, generator=generator).numpy()
        return exported_inputs(model.config, encode_sounds(processor, [*sounds]))
    tokens = torch.randint(0, len(processor), (batch, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[-1, -2:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens)}
    return {name: value for name, value in inputs.items() if name in processor.model_input_names}


def _axes(inputs: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
    """Any number of samples, and of tokens or of a waveform's length."""
    free = torch.export.Dim.DYNAMIC
    of_fixed_size = "pixel_values" in inputs or "input_features" in inputs or next(iter(inputs.values())).ndim > 2
    return {name: {0: free} if of_fixed_size else {0: free, 1: free} for name in inputs}


def _write_onnx(model: Any, inputs: dict[str, Tensor], file: Path) -> None:
    try:
        import onnxscript  # noqa: F401
        from transformers.exporters import OnnxConfig, OnnxExporter
    except ImportError as error:
        raise ValueError(f"ONNX needs more: {install_hint('export')}") from error
    check_onnx(model)
    large = sum(parameter.nbytes for parameter in model.parameters()) > 1.5e9  # one file holds at most 2 GB
    config = OnnxConfig(dynamic=True, dynamic_shapes=_axes(inputs), output_path=str(file), external_data=large)
    OnnxExporter().export(model, inputs, config)


def check_onnx(model: Any) -> None:
    """Raise ValueError for a normalisation that only a decomposition gives, which ONNX has none of."""
    for head in heads_of(model.classifier):
        norm = getattr(head.pool, "norm", None)
        if isinstance(norm, MatrixPowerNorm):
            raise SettingError("the normalisation mpn has no form in ONNX: choose isqrt, or {to}=torch")
        if isinstance(norm, SingularValuePowerNorm) and norm.exponent not in ROOTS:
            accepted = " and ".join(map(str, ROOTS))
            said = "svpn has a form in ONNX for exponents {}, got {}: take {to}=torch"
            raise SettingError(said, accepted, norm.exponent)


def _write_torch(model: Any, inputs: dict[str, Tensor], file: Path) -> None:
    program = torch.export.export(model, (), inputs, dynamic_shapes=_axes(inputs))
    torch.export.save(program, file)


@contextmanager
def _able(model: Any) -> Iterator[None]:
    """One sentence for a backbone of sounds that no exporter follows, or for some lengths only."""
    said = f"{type(model.body).__name__} cannot be exported for clips of any length"
    if model.config.backbone_config.model_type in BOUND_TO_LENGTHS:
        raise ValueError(said)
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:  # torch has many kinds
        if model.config.modality != "audio":
            raise
        raise ValueError(f"{said}: {one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the chatter of exporters, which goes to standard output and to the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(before)


@torch.inference_mode()
def _compare(model: Any, processor: Any, file: Path) -> dict[int, float]:
    exported, _ = load_exported(file)
    differences = {}
    for batch, length in SIZES:
        inputs = sample_inputs(model, processor, batch, length)
        expected = model(**inputs).logits
        difference = (exported(**inputs).logits - expected).abs().max().item()
        if not difference <= TOLERANCE * expected.abs().max().item():
            raise ValueError(f"the exported model differs by {difference:.2g} on {batch} samples: nothing was written")
        differences[batch] = difference
    return differences


class ExportedModel:
    """Runs an exported file as the model it was: keyword tensors in, `.logits` out."""

    def __init__(self, file: Path, config: Any) -> None:
        self.config, self.device = config, torch.device("cpu")
        self.run = _open_onnx(file) if file.suffix == FORMATS["onnx"] else _open_program(file)

    def __call__(self, **inputs: Tensor) -> SimpleNamespace:
        if self.config.modality == "audio":
            inputs = exported_inputs(self.config, inputs)
        return SimpleNamespace(logits=self.run(inputs))


def _open_onnx(file: Path) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ValueError(f"{file} needs onnxruntime: {install_hint('export')}") from error
    with _blaming(file):
        session = onnxruntime.InferenceSession(file, providers=onnxruntime.get_available_providers())

    def run(inputs: dict[str, Tensor]) -> Tensor:
        logits = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})[0]
        return torch.as_tensor(logits)

    return run


def _open_program(file: Path) -> Any:
    with _blaming(file), zipfile.ZipFile(file) as archive:
        if any(part in name for name in archive.namelist() for part in RUNS_CODE):
            raise ValueError("it holds objects that run code when they are read")
    with _blaming(file), patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):  # else it falls back to pickle
        program = torch.export.load(file).module()
    return lambda inputs: program(**inputs).logits


@contextmanager
def _blaming(file: Path) -> Iterator[None]:
    """One sentence for whatever the libraries raise on a file that is none of theirs."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{file} is damaged or was not made by sot export: {reason}") from error


def load_exported(file: Path) -> tuple[ExportedModel, Any]:
    """An exported model and its image processor or tokenizer, which lie beside it."""
    config = load_config(exported_folder(file))
    return ExportedModel(file, config), load_processor(file.parent, config)
