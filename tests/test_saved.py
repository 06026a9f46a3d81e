"""Folders of version 0.1.0, when `norm: null` was the fast one: they open, with equal logits."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

import sot
from sot.models.folder import folder_modality
from sot.saved import is_trained

FOLDERS = sorted(path for path in (Path(__file__).parent / "saved").iterdir() if path.is_dir())


def inputs_of(folder):
    if folder.name.startswith("image-"):
        return {"pixel_values": torch.sin(torch.arange(2 * 3 * 16 * 16.0)).view(2, 3, 16, 16)}
    ids = torch.arange(2 * 9).view(2, 9) % 23
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_of_an_earlier_version_gives_the_same_logits(folder):
    kind = AutoModelForImageClassification if folder.name.startswith("image-") else AutoModelForSequenceClassification
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert isinstance(model, sot.SoTForImageClassification | sot.SoTForSequenceClassification)
    with torch.no_grad():
        logits = model.eval()(**inputs_of(folder)).logits
    torch.testing.assert_close(
        logits, torch.tensor(json.loads((folder / "logits.json").read_text())), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_that_is_saved_again_names_its_norm(folder, tmp_path):
    settings = json.loads((folder / "config.json").read_text())
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path)
    now = json.loads((tmp_path / "config.json").read_text())
    assert (settings["model_type"], now["model_type"]) == ("sot", "second-order-transformer")
    saved, again = settings["head"], now["head"]
    unnamed = {"mgcrp": "svpn_fast", "gcp": "isqrt"}.get(saved["pool"]) if saved["fusion"] != "class" else None
    assert again == {"average": False, **saved, "norm": saved["norm"] or unnamed}
    assert sot.HeadConfig.from_dict(again) == sot.HeadConfig.from_saved(saved)


def test_a_folder_of_an_earlier_version_is_one_of_ours_without_a_warning(caplog):
    folder = Path(__file__).parent / "saved" / "image-class"
    for config in (AutoConfig.from_pretrained(folder), sot.SoTConfig.from_pretrained(folder)):
        assert isinstance(config, sot.SoTConfig) and config.model_type == "second-order-transformer"
    assert folder_modality(folder) == "image" and is_trained(str(folder))
    assert not caplog.records


def test_settings_without_effect_do_not_close_a_folder():
    saved = {**sot.HeadConfig(pool="gcp", norm="mpn").to_dict(), "left_dim": 8, "num_values": 3, "num_queries": 8}
    assert sot.SoTConfig(head=saved).head == sot.HeadConfig(pool="gcp", norm="mpn").to_dict()


def test_every_pooling_and_both_modalities_are_among_them():
    heads = [json.loads((folder / "config.json").read_text())["head"] for folder in FOLDERS]
    assert {head["pool"] for head in heads} == set(sot.POOLS.own) - {"mhc3"}  # which came later
    assert {head["norm"] for head in heads} == {None, *sot.NORMS.own} - {"isqrt", "svpn_fast"}
    assert {head["fusion"] for head in heads} == {fusion.value for fusion in sot.Fusion}
    assert {folder.name.partition("-")[0] for folder in FOLDERS} == {"image", "text"}
