"""What others get of a model: its card, its features, and its copy on the hub."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import torch
import yaml
from audio_models import audio_backbone
from ddp_worker import HEAD, SIZE
from transformers import AutoModel, AutoModelForImageClassification, AutoModelForSequenceClassification

import sot
from sot.models.card import card


def equip_image(**options):
    head = {**HEAD, **options.pop("head", {})}
    arguments = {"pretrained": False, "model_args": {"img_size": SIZE}}
    return sot.equip("test_vit", labels=["a", "b"], head=head, **arguments).eval()


def head_of(text):
    return yaml.safe_load(text.removeprefix("---\n").split("\n---\n")[0])


WITHOUT_US = """
import sys
sys.modules["sot"] = None  # as if it were not installed
import transformers
from transformers import pipeline
kinds = (transformers.AutoConfig, transformers.AutoModel, transformers.AutoModelForImageClassification)
ways = [*(kind.from_pretrained for kind in kinds), lambda folder: pipeline("image-classification", folder)]
for way in ways:
    try:
        way(sys.argv[1])
    except ValueError as error:
        print(" ".join(str(error).split()))
"""


def errors_without_us(folder):
    """What transformers says of a folder where this package cannot be imported, by each way to open one."""
    command = [sys.executable, "-c", WITHOUT_US, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- the card ----------------------------------------------------------------------------------------------


def test_a_saved_model_has_a_card_that_says_how_to_load_it(tmp_path):
    model = equip_image()
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    facts = head_of(text)
    assert facts["pipeline_tag"] == "image-classification" and facts["library_name"] == "transformers"
    assert "Classes: a, b." in text and "second-order-transformer" in text and "import sot" in text
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_the_error_where_the_package_is_missing_names_it_and_the_card_quotes_the_error(tmp_path):
    equip_image().save_pretrained(tmp_path)
    project = Path(__file__).parent.parent / "pyproject.toml"
    (distribution,) = re.findall(r'^name = "(.+)"$', project.read_text(), re.MULTILINE)
    errors = errors_without_us(tmp_path)
    assert len(errors) == 4 and all(f"model type `{distribution}` but" in error for error in errors)
    said = errors[0][: errors[0].index("architecture") + len("architecture")]
    text = " ".join((tmp_path / "README.md").read_text().split())
    assert said in text  # so that whoever meets it finds the way out
    assert "That type is the name of the package to install" in text


def test_scores_are_the_model_index_of_a_card():
    head = sot.HeadConfig().to_dict()
    text = card("m: [x]\n---", ["a"], "text", head, metrics={"accuracy": 0.5, "loss": 1.25}, dataset="my.csv")
    (entry,) = head_of(text)["model-index"]
    assert entry["name"] == "m: [x] ---"
    found = {each["type"]: each["value"] for result in entry["results"] for each in result["metrics"]}
    assert found == {"accuracy": 0.5, "loss": 1.25} and entry["results"][0]["dataset"]["name"] == "my.csv"
    assert entry["results"][0]["task"]["type"] == "text-classification" and "| accuracy | 0.5000 |" in text


def test_a_card_has_the_scores_of_each_class_and_of_many_the_worst():
    def shown(count):
        rows = {f"c|{i}": {"samples": i, "precision": 0.5, "recall": 0.25, "f1": i / count} for i in range(count)}
        return card("m", [*rows], "text", sot.HeadConfig().to_dict(), by_class=rows)

    assert "| class | samples | precision | recall | F1 |" in shown(2)
    assert "| c\\|1 | 1 | 0.500 | 0.250 | 0.500 |" in shown(2)
    assert "class (lowest F1 of 21)" in shown(21) and "| c\\|19 |" in shown(21) and "| c\\|20 |" not in shown(21)


# --- features ----------------------------------------------------------------------------------------------


def test_auto_model_gives_the_features_of_images(tmp_path):
    model = equip_image()
    model.save_pretrained(tmp_path)
    features = AutoModel.from_pretrained(tmp_path)
    assert isinstance(features, sot.SoTModel) and features.main_input_name == "pixel_values"
    images = torch.randn(2, 3, SIZE, SIZE)
    with torch.inference_mode():
        found, tokens = features(images), model.tokens(images)
        expected = model.classifier(tokens.class_token, tokens.word_tokens, pre_logits=True)
        logits = AutoModelForImageClassification.from_pretrained(tmp_path)(images).logits
    torch.testing.assert_close(found.pooler_output, expected)
    torch.testing.assert_close(found.last_hidden_state[:, 0], tokens.class_token)
    torch.testing.assert_close(found.last_hidden_state[:, 1:], tokens.word_tokens)
    torch.testing.assert_close(logits, model(images).logits)
    assert found.pooler_output.shape[1] == model.classifier.num_features


def test_auto_model_gives_the_features_of_texts(stand_ins, tmp_path):
    model = sot.equip(stand_ins["google-bert/bert-base-uncased"], labels=["no", "yes"], head=HEAD).eval()
    model.save_pretrained(tmp_path)
    features = AutoModel.from_pretrained(tmp_path)
    batch = model.processor(["the cat", "cats sleep the cat"], return_tensors="pt", padding=True)
    with torch.inference_mode():
        found, tokens = features(**batch), model.tokens(**batch)
        expected = model.classifier(tokens.class_token, tokens.word_tokens, tokens.mask, pre_logits=True)
        alone = features(**model.processor(["the cat"], return_tensors="pt")).pooler_output
    torch.testing.assert_close(found.pooler_output, expected)
    torch.testing.assert_close(found.pooler_output[:1], alone, rtol=1e-4, atol=1e-5)
    assert found.last_hidden_state.shape[:2] == batch["input_ids"].shape
    assert features(**batch, return_dict=False)[1].shape == expected.shape
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)).__name__ == "SoTForSequenceClassification"


def test_auto_model_gives_the_features_of_sounds(tmp_path):
    backbone, _ = audio_backbone("wav2vec2")
    model = sot.equip(backbone, labels=["a", "b"], head=HEAD).eval()
    model.save_pretrained(tmp_path)
    assert "A transformer for sounds" in (tmp_path / "README.md").read_text()
    features, waves = AutoModel.from_pretrained(tmp_path), torch.randn(2, 4000)
    with torch.inference_mode():
        found, tokens = features(waves), model.tokens(waves)
        expected = model.classifier(tokens.class_token, tokens.word_tokens, tokens.mask, pre_logits=True)
    torch.testing.assert_close(found.pooler_output, expected)
    torch.testing.assert_close(found.last_hidden_state, tokens.word_tokens)


# --- the hub -----------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as an upload needs; what is committed is kept."""

    files: ClassVar[dict] = {}
    asked: ClassVar[list] = []

    def reply(self, code, content=None, **headers):
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self):
        self.asked.append(self.path)
        self.reply(404, X_Error_Code="EntryNotFound")

    def do_GET(self):
        self.asked.append(self.path)
        self.reply(200, {"id": "me/cats", "sha": "0" * 40, "siblings": [], "private": False})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        place = f"http://{self.headers['Host']}/me/cats"
        if self.path == "/api/repos/create":
            self.reply(200, {"url": place, "name": "me/cats", "id": "1"})
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            self.reply(200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.reply(200, {"success": True, "commitUrl": f"{place}/commit/1", "commitOid": "1"})
        else:
            self.reply(200, {"errors": [], "warnings": []})

    def log_message(self, *arguments):
        pass


PUSH = """
import sys
from transformers import AutoModelForImageClassification
import sot
model = AutoModelForImageClassification.from_pretrained(sys.argv[1])
print(model.push_to_hub("me/cats", token="hf_made_up", commit_message="First"))
"""


def test_push_to_hub_uploads_all_that_others_need(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    model = equip_image()
    model.save_pretrained(tmp_path / "model")
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    hub |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", PUSH, str(tmp_path / "model")]
    try:
        result = subprocess.run(command, env={**os.environ, **hub}, capture_output=True, text=True, timeout=300)
    finally:
        server.shutdown()
        server.server_close()
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().startswith(f"{hub['HF_ENDPOINT']}/me/cats"), result.stdout
    assert {"config.json", "model.safetensors", "README.md"} <= set(Hub.files)
    assert "import sot" in Hub.files["README.md"].decode()
    for name, content in Hub.files.items():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    images = torch.randn(1, 3, SIZE, SIZE)
    copy = AutoModelForImageClassification.from_pretrained(tmp_path / "copy")
    with torch.inference_mode():
        torch.testing.assert_close(copy(images).logits, model(images).logits)
