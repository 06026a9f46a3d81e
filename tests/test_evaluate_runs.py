"""What a run remembers of its data and model, wherever it is resumed or evaluated from."""

import json

import pytest

from sot.core.head import HeadConfig
from sot.training.recipe import Recipe
from sot.training.run_folder import full_name, is_whole, open_run


def test_a_run_goes_on_however_its_data_and_model_are_spelt(tmp_path, monkeypatch):
    for name in ("data", "model", "digits"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    recipe, out = Recipe(), tmp_path / "run"

    def resume(data, model):
        with open_run(out, {"command": "train", "model": model, "data": data}, recipe, resume=True, overwrite=False):
            pass

    for data, model in (("data", "model"), ("./data", "./model"), (str(tmp_path / "data"), str(tmp_path / "model"))):
        resume(data, model)
    for data, model, message in (("model", "model", "data"), ("data", "data", "model"), ("digits", "model", "data")):
        with pytest.raises(ValueError, match=f"run is a run of {message} '.*', not '{data}'"):
            resume(data, model)
    assert full_name("digits") == "digits" != full_name("./digits") and full_name("hfds/a") == "hfds/a"
    assert full_name("wds/a@data") == f"wds/a@{(tmp_path / 'data').resolve()}"
    (out / "run.json").write_text("[]")
    with pytest.raises(ValueError, match=r"run\.json is damaged: it holds '\[\]', not an object of JSON"):
        resume("data", "model")
    (out / "manifest.json").write_text("[]")
    assert not is_whole(out)


@pytest.mark.parametrize("settings", [{"heads": 2}, {"pool": "gcp"}, {"fusion": "class"}])
def test_a_run_of_version_0_1_0_goes_on_with_the_head_it_was_started_with(settings, tmp_path):
    old, file = HeadConfig.paper(**settings), tmp_path / "run.json"

    def resume(head):
        identity = {"command": "train", "model": "test_vit", "data": "digits", "head": head.to_dict()}
        with open_run(tmp_path, identity, Recipe(), resume=True, overwrite=False):
            pass

    resume(old)
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "head": {**kept["head"], "norm": None}}))
    with pytest.raises(ValueError, match=r"is a run of head .*'norm': None"):
        resume(HeadConfig(heads=3))
    resume(old)
    assert json.loads(file.read_text()) == kept
