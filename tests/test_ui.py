"""Behind the page: models, answers, and what the server does with strangers. A browser looks at it in tests/browser."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import httpx
import pytest
import torch
from gradio_client import Client, handle_file
from PIL import Image
from test_cli import sot
from ui_models import save_digits, save_verbs

from sot import Classifier, equip
from sot.data.imagenet import readable
from sot.explain import explain_item, open_upload
from sot.ui.page import NONE, answers
from sot.ui.results import MAX_SIDE, answer, read_picture
from sot.ui.serve import MAX_FILE, MAX_REQUEST, serving
from sot.ui.shown import (
    DIGITS,
    Shown,
    Training,
    example_pictures,
    first_models,
    names_of,
    open_models,
    small_model,
    small_recipe,
)

OPTIONS = ("default", "the predicted one", "unknown")
TINY = small_recipe().changed(["epochs=1", "warmup_epochs=0", "train_samples=128"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models of digits, one of texts, and a picture."""
    root = tmp_path_factory.mktemp("ui")
    save_digits(root / "digits", steps=150, side=16)
    save_digits(root / "class", "class", steps=2, side=16)
    save_verbs(root / "verbs", steps=20)
    example_pictures(DIGITS)["digit-3"].save(root / "three.png")
    return root


@pytest.fixture(scope="module")
def models(place):
    return open_models([place / "digits", place / "class", place / "verbs"])


@pytest.fixture(scope="module")
def address(models):
    with serving(models) as found:
        yield found.rstrip("/")


@pytest.fixture(scope="module")
def client(address):
    return Client(address, verbose=False)


def ask(client, model="digits", other=NONE, picture=None, text="", pair="", options=OPTIONS):
    """What a program gets from the page."""
    found = client.predict(
        model, other, None if picture is None else handle_file(picture), text, pair, *options, api_name="/explain"
    )
    return [value["value"] if isinstance(value, dict) else value for value in found]


def bomb(width, height):
    """A PNG file of a few kilobytes with that many black pixels."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    packer, rows = zlib.compressobj(9), bytes(1 + (width + 7) // 8)
    packed = b"".join(packer.compress(rows) for _ in range(height)) + packer.flush()
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


# --- models ------------------------------------------------------------------------------------------------


def test_folders_are_called_by_their_last_part_unless_two_share_it():
    assert names_of([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert names_of([Path("a/x"), Path("b/x")]) == ["a/x", "b/x"]


def test_a_model_is_trained_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = TINY
    folder = small_model(recipe)
    assert tmp_path in folder.parents and not list(folder.glob("checkpoint-*"))
    (shown,) = open_models([folder]).values()
    assert shown.labels == DIGITS and shown.modality == "image"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert small_model(recipe) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [*folder.parent.iterdir()] == [folder]


def test_the_page_is_there_while_its_model_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sot.ui.shown.small_recipe", lambda: TINY)
    said = []
    models = first_models(said.append)
    assert len(said) == 1 and models["digits"].model is None
    example_pictures(DIGITS)["digit-3"].save(tmp_path / "three.png")
    assert "sot-result" in answer(models["digits"], str(tmp_path / "three.png"), None, None, *OPTIONS)  # it waits
    assert models["digits"].awaited.share == 1 and models["digits"].awaited.wait(0)
    models["digits"].stop()
    again = first_models(said.append)
    assert len(said) == 1 and again["digits"].model is not None and again["digits"].ready() is again["digits"]


def test_a_training_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    training = Training(TINY.changed(["epochs=1000"]))
    while training.share == 0 and not training.wait(0.05):
        pass
    training.stop()
    assert training.wait(0) and training.share < 1 and not [*(tmp_path / "sot").iterdir()]
    html = answer(Shown("digits", "image", DIGITS, awaited=training), None, None, None, *OPTIONS)
    assert "sot-refusal" in html


def test_codes_of_imagenet_are_shown_as_words(tmp_path):
    codes = ["n02102040", "mine", "n01440764", "n02012849", "n03126707"]
    names = ["English springer", "mine", "tench", "n02012849", "n03126707"]  # two are called crane
    assert readable(codes) == names
    model = equip("test_vit", labels=codes, head={"heads": 1, "left_dim": 4, "right_dim": 4}, pretrained=False)
    model.save_pretrained(tmp_path / "vit")
    (shown,) = open_models([tmp_path / "vit"]).values()
    assert shown.labels == names
    html = answer(shown, str(next(iter(save_examples(tmp_path)))), None, None, "default", "English springer", "tench")
    assert "evidence for <b>English springer" in html and "It is tench." in html and codes[0] not in html


def save_examples(folder):
    for name, image in example_pictures([]).items():
        image.save(folder / f"{name}.png")
        yield folder / f"{name}.png"


def test_a_classifier_that_was_fitted_and_saved_opens(tmp_path, stand_ins):
    texts = ["good film", "bad film", "good play", "bad play"] * 6
    fitted = Classifier(stand_ins["google-bert/bert-base-uncased"]).fit(texts, ["up", "down"] * 12)
    fitted.save(tmp_path / "fitted")
    (shown,) = open_models([tmp_path / "fitted"]).values()
    assert sorted(shown.labels) == ["down", "up"]
    html = answer(shown, None, "a good film", None, *OPTIONS)
    assert "sot-result" in html and fitted.predict(["a good film"])[0] in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["three.png"], "three.png"),
        (["."], "config.json"),
        (["digits", "digits"], "was given twice"),
        (["digits", "--host", "256.256.256.256"], "cannot listen on 256.256.256.256"),
        (["digits", "--port", "0"], "--port"),
    ],
)
def test_wrong_arguments_end_the_command_before_it_serves(place, arguments, message):
    result = sot("ui", *arguments, "--no-browser", cwd=place)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_named(place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = sot("ui", "digits", "--port", str(port), "--no-browser", cwd=place)
    assert result.returncode == 2 and f"port {port}" in result.stderr


# --- answers -----------------------------------------------------------------------------------------------


def test_a_picture_is_answered_with_what_the_model_says(place, models):
    html = answer(models["digits"], str(place / "three.png"), None, None, *OPTIONS)
    shown = models["digits"]
    found = explain_item(shown.model, shown.processor, open_upload(place / "three.png"))
    names = re.findall(r'sot-name">([^<]*)<', html)
    scores = [float(score) for score in re.findall(r'sot-score">([^<]*)<', html)]
    assert names == [name for name, _ in found.predictions]
    assert scores == pytest.approx([score for _, score in found.predictions], abs=6e-4)
    titles = [unescape(title) for title in re.findall("<h3>(.*?)</h3>", html)]
    assert titles[1:4] == [f"{column.name.capitalize()}: {column.predicted}" for column in found.columns]
    assert html.count("data:image/png") == 5 and html.count("<svg") == 2  # maps, pairs and the figure; two charts
    assert 'download="explanation.npz"' in html


def test_a_pair_of_texts_is_answered_word_by_word(models):
    html = answer(models["verbs"], None, "the old cat sleeps", "the kings laugh", "gradient", "odd", "even")
    assert html.count("sot-words") == 3 and "kings" in html and "by gradient" in html and "evidence for <b>odd" in html
    assert html.count("✓") + html.count("✗") >= 3 and 'download="explanation.html"' in html


def test_nothing_in_an_answer_comes_alive(place, models):
    name = "<script>x</script>{{1+1}}${2}"
    labels = dict(enumerate([f"{name}{number}" for number in range(10)]))
    shown = replace(models["digits"], name=name)
    before = shown.model.config.id2label
    shown.model.config.id2label = labels
    try:
        html = answer(shown, str(place / "three.png"), None, None, *OPTIONS)
    finally:
        shown.model.config.id2label = before
    text = answer(models["verbs"], None, name, None, *OPTIONS)
    for found in (html, text, answers(models, name, NONE)[0], answer(models["digits"], None, None, None, name, "", "")):
        assert "<script" not in found and "{" not in found and len(found) > 50
    assert "<script>x</script>{{1+1}}${2}" in unescape(html)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no image that can be read"),
        (b"no picture", "no image that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "no image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "no image that can be read"),
        (bomb(20_000, 20_000), "at most 50,000,000"),
        (bomb(8000, 8000), "at most 50,000,000"),
        (bomb(3000, 3000)[:300], "cannot be read|cannot read"),
        (b"\x89PNG\r\n\x1a\n" + bytes(400), "cannot be read|no image"),
        (b"II*\x00" + b"\xff" * 400, "cannot be read|no image|cannot read"),
    ],
    ids=["empty", "words", "svg", "postscript", "bomb", "large", "cut", "zeros", "tiff"],
)
def test_what_is_no_picture_is_refused_in_words(tmp_path, models, content, said):
    (tmp_path / "file.png").write_bytes(content)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    html = answer(models["digits"], str(tmp_path / "file.png"), None, None, *OPTIONS)
    assert "sot-refusal" in html and re.search(said, unescape(html)), html
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes: 50 MB would be the bomb packed as bits


def test_odd_pictures_are_read(tmp_path, models):
    for number, (mode, kind) in enumerate(
        [("RGBA", "PNG"), ("L", "JPEG"), ("P", "GIF"), ("1", "BMP"), ("I;16", "TIFF")]
    ):
        Image.new(mode, (1 + 300 * number, 7)).save(tmp_path / f"{number}", kind)
        picture = read_picture(str(tmp_path / f"{number}"))
        assert picture.mode == "RGB" and picture.size == (1 + 300 * number, 7)
    assert "sot-result" in answer(models["digits"], str(tmp_path / "4"), None, None, *OPTIONS)
    (tmp_path / "large.png").write_bytes(bomb(4096, 1024))
    assert read_picture(str(tmp_path / "large.png")).size == (MAX_SIDE, MAX_SIDE // 4)


@pytest.mark.parametrize(
    ("model", "text", "options", "said"),
    [
        ("digits", None, OPTIONS, "drop an image first"),
        ("verbs", " \n", OPTIONS, "type a sentence first"),
        ("verbs", "the cat " * 12_500, OPTIONS, "100,000 characters"),
        ("verbs", "the cat", ("gradcam", "", ""), "unknown method 'gradcam'"),
        ("verbs", "the cat", ("default", "neither", ""), "'neither' is not a class"),
        ("verbs", "the cat", ("default", "", "neither"), "'neither' is not a class"),
    ],
)
def test_other_errors_are_words_too(models, model, text, options, said):
    html = answer(models[model], None, text, None, *options)
    assert "sot-refusal" in html and said in unescape(html)


def test_a_fault_of_ours_is_no_traceback(models, caplog):
    broken = replace(models["verbs"], processor=lambda *_, **__: 1 / 0)
    broken.processor.is_fast, broken.processor.model_max_length = True, 8
    html = answer(broken, None, "the cat", None, *OPTIONS)
    assert "sot-refusal" in html and "division" not in html and "ZeroDivisionError" in caplog.text


# --- the server --------------------------------------------------------------------------------------------


def test_programs_get_the_same_answers_and_compare_models(client, place, models):
    left, right = ask(client, picture=place / "three.png")
    assert left == answer(models["digits"], str(place / "three.png"), None, None, *OPTIONS) and not right
    left, right = ask(client, other="class", picture=place / "three.png")
    assert "<h2>digits</h2>" in left and "<h2>class</h2>" in right
    assert "does not pool words" in right and "does not pool words" not in left
    assert "sot-words" in ask(client, "verbs", text="the old cat sleeps")[0]


def test_the_page_may_load_nothing_from_elsewhere(address):
    page = httpx.get(address + "/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?(https?:)?//", page.text)
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


@pytest.mark.parametrize(
    "path",
    [
        "/file=/etc/passwd",
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=../../../../../../etc/passwd",
        "/gradio_api/file=file:///etc/passwd",
        "/gradio_api/file/etc/passwd",
        "/gradio_api/proxy=http://127.0.0.1:1/",
        "/gradio_api/file=http://127.0.0.1:1/",
        "/static/../../../../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/svelte/..%2f..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc/passwd",
        "/gradio_api/file=.",
        "/gradio_api/vibe-code",
        "/gradio_api/runs",
        "/monitoring",
        "/docs",
        "/openapi.json",
    ],
)
def test_nothing_else_is_served(address, path):
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:  # a library would tidy the path up
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        reply = b"".join(iter(lambda: line.recv(65536), b""))
    assert re.match(rb"HTTP/1\.1 (3|4)\d\d", reply) and b"root:" not in reply, reply[:200]
    assert not reply.startswith(b"HTTP/1.1 3") or b"location: http://127.0.0.1:1/" in reply.lower()


def test_files_of_the_working_folder_and_of_others_are_not_served(address, tmp_path):
    for secret in (Path("pyproject.toml").resolve(), tmp_path / "secret.txt"):
        if not secret.exists():
            secret.write_text("secret")
        assert httpx.get(f"{address}/gradio_api/file={secret}").status_code in (403, 404)


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", "http://127.0.0.1:1/a.png", "file:///etc/passwd"])
def test_only_uploads_are_opened(address, path):
    data = ["digits", NONE, {"path": path, "meta": {"_type": "gradio.FileData"}}, "", "", *OPTIONS]
    event = httpx.post(f"{address}/gradio_api/call/explain", json={"data": data}).json()["event_id"]
    reply = httpx.get(f"{address}/gradio_api/call/explain/{event}", timeout=60).text
    assert "event: error" in reply and "sot-result" not in reply and "root:" not in reply


def test_a_name_with_a_path_in_it_stays_in_the_folder_of_uploads(address, place):
    content = (place / "three.png").read_bytes()
    for name in (
        "../../../../tmp/sot-ui-evil.png",
        "/tmp/sot-ui-evil.png",
        "..",
        "a\x00b.png",
        "x" * 5000 + ".png",
        "CON:?*.png",
    ):
        reply = httpx.post(f"{address}/gradio_api/upload", files={"files": (name, content)}, timeout=60)
        assert reply.status_code in (200, 400, 413)
        if reply.status_code == 200:
            (stored,) = reply.json()
            assert Path(stored).resolve().is_relative_to(Path(os.environ["GRADIO_TEMP_DIR"]).resolve())
            served = httpx.get(f"{address}/gradio_api/file={stored}")
            assert served.content == content or 400 <= served.status_code < 500
    assert not Path("/tmp/sot-ui-evil.png").exists()


def test_what_is_too_large_is_not_taken_in(address):
    reply = httpx.post(f"{address}/gradio_api/upload", files={"files": ("a.png", bytes(MAX_FILE + 1))}, timeout=60)
    assert reply.status_code == 413
    assert httpx.post(f"{address}/gradio_api/queue/join", content=bytes(MAX_REQUEST + 1)).status_code == 413
    before = getrusage(RUSAGE_SELF).ru_maxrss

    def endless():
        for _ in range(300):
            yield bytes(1_000_000)

    try:
        status = httpx.post(f"{address}/gradio_api/queue/join", content=endless(), timeout=60).status_code
    except httpx.HTTPError:
        status = 400  # the line was cut
    assert 400 <= status < 500 and getrusage(RUSAGE_SELF).ru_maxrss - before < 100_000
    assert httpx.get(address + "/").status_code == 200


def test_names_that_were_pointed_at_this_machine_are_refused(address):
    assert httpx.get(address + "/", headers={"Host": "evil.example"}).status_code == 400
    assert address.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),
        ({"Origin": "{}"}, 200),
        ({"Origin": "{}", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://strange.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_uploads_of_other_pages_are_refused(address, place, headers, status):
    own = {name: value.format(address) for name, value in headers.items()}
    upload = {"files": ("three.png", (place / "three.png").read_bytes())}
    answered = httpx.post(f"{address}/gradio_api/upload", files=upload, headers=own)
    assert answered.status_code == status, answered.text


def test_a_link_from_elsewhere_opens_the_page_and_a_form_does_not(address):
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert httpx.get(address, headers=link).status_code == 200
    form = {**link, "Origin": "http://strange.example"}
    assert httpx.post(f"{address}/gradio_api/upload", headers=form).status_code == 403


SERVE = """
import sys, tempfile, threading
from pathlib import Path
from sot.ui.shown import open_models
from sot.ui.serve import serve
serve(open_models([Path(sys.argv[1])]), "127.0.0.1", None, lambda at: print(at, flush=True), threading.Event().wait)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_uploads_are_gone_when_the_server_is(place, tmp_path, end):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", SERVE, place / "digits"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        at = server.stdout.readline().strip()
        upload = {"files": ("three.png", (place / "three.png").read_bytes())}
        assert httpx.post(f"{at}gradio_api/upload", files=upload).status_code == 200
        assert [*tmp_path.glob("sot-ui-*/**/three.png")]
        server.send_signal(end)
        assert server.wait(60) == 0
    assert not [*tmp_path.glob("sot-ui-*")]


def test_twenty_at_once_are_served_in_bounded_memory(address, place):
    (place / "large.png").write_bytes(bomb(7000, 7000))  # within the limit: 196 MB decoded
    (place / "bad.png").write_bytes(bomb(20_000, 20_000))
    clients = [Client(address, verbose=False) for _ in range(4)]
    kinds = [
        {"picture": place / "large.png"},
        {"picture": place / "bad.png"},
        {"model": "verbs", "text": "x" * 100_000},
    ]
    kinds += [{"model": "verbs", "text": "the cat sleeps"}, {"picture": place / "bad.png"}]
    ask(clients[0], **kinds[0])
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(20) as pool:
        found = [*pool.map(lambda number: ask(clients[number % 4], **kinds[number % 5])[0], range(20))]
    assert ["sot-result" in html for html in found] == [True, False, False, True, False] * 4
    assert all("sot-refusal" in html for number, html in enumerate(found) if number % 5 in (1, 2, 4))
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 400_000  # all of them at once would take 800 MB more
    assert httpx.get(address + "/").status_code == 200


@pytest.mark.slow
def test_the_command_serves_a_model_of_its_own_until_interrupted(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "sot", "ui", "--no-browser"]
    started = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        line = server.stdout.readline()
        print(f"ready after {time.monotonic() - started:.0f} s")
        address = line.split()[0]
        assert address.startswith("http://127.0.0.1:") and httpx.get(address).status_code == 200
        example_pictures(DIGITS)["digit-0"].save(tmp_path / "zero.png")
        (name,) = [path.name for path in (tmp_path / "sot").iterdir()]
        assert "sot-result" in ask(Client(address, verbose=False), name, picture=tmp_path / "zero.png")[0]
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0 and "Training a small model" in errors and "Traceback" not in errors


def test_digits_are_learned(models):
    """The tests above look at a model that knows something."""
    shown, right = models["digits"], 0
    for name, picture in example_pictures(DIGITS).items():
        with torch.no_grad():
            logits = shown.model(**shown.processor(picture.convert("RGB"), return_tensors="pt")).logits
        right += name == f"digit-{int(logits.argmax())}"
    assert right >= 6
