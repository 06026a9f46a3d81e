"""timm's tests/test_models.py for the models that this package registers."""

import importlib.util
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import timm

import sot  # noqa: F401  registers the family
from sot.models.variants import register_peers

register_peers()
ALL = timm.list_models
FIXTURE = type(pytest.fixture(lambda: None))
OURS = [name for name in ALL() if timm.model_entrypoint(name).__module__.startswith("sot.")]


def our_models(filter="", module="", pretrained=False, **options):
    """Of what timm would list ours; where it lists modules, those that do what is asked of them."""
    if pretrained:
        return []
    if module:
        with_features = ("sot_", "conformer_", "irpe_", "autoformer_")
        return [name for name in OURS if name.startswith(with_features)]
    if "vit_*" in filter or "vit_*" in options.get("exclude_filters", ""):  # its list of transformers, or of others
        return OURS if "vit_*" in filter else []
    return [name for name in ALL(filter, **options) if name in OURS]


with patch.object(timm, "list_models", our_models), patch.object(timm, "list_pretrained", lambda *_: []):
    spec = importlib.util.spec_from_file_location("timm_tests", Path(os.environ["TIMM"]) / "tests" / "test_models.py")
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
taken = {
    name: each for name, each in vars(suite).items() if name.startswith("test_model_") or isinstance(each, FIXTURE)
}
globals().update(taken)
