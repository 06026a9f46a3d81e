"""Layout and events of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from sot.explain import IMAGE_METHODS, TEXT_METHODS
from sot.ui.results import PREDICTED, UNKNOWN, answer, refusal, training_bar
from sot.ui.shown import SENTENCES, Shown, example_pictures
from sot.ui.style import GREETING, HEADLINE, SCROLL

NONE = "no other model"
DEFAULT = "default"
TITLE = "SoT: what class token and words look at"


class Page(gr.Blocks):
    """Blocks that never fetch: a link in place of an upload is refused."""

    async def preprocess_data(self, block_fn: Any, inputs: Any, state: Any, explicit_call: bool = False) -> Any:
        if _has_link(inputs):
            raise gr.Error("Links are not fetched: upload the image itself.", print_exception=False)
        return await super().preprocess_data(block_fn, inputs, state, explicit_call)


def _has_link(value: Any) -> bool:
    if isinstance(value, Mapping):
        path = value.get("path")
        return (isinstance(path, str) and "://" in path) or any(map(_has_link, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_link, value))


@dataclass
class PageInputs:
    """The left side of the page."""

    model: Any
    other: Any
    picture: Any
    text: Any
    pair: Any
    method: Any
    target: Any
    truth: Any
    button: Any
    sides: list[Any]  # shown for a model of pictures, of texts
    examples: dict[str, tuple[Any, Any]]  # by kind, a group and what it consists of

    def values(self) -> list[Any]:
        """What an explanation is made from."""
        return [self.model, self.other, self.picture, self.text, self.pair, self.method, self.target, self.truth]


def build_page(models: Mapping[str, Shown], folder: Path) -> Page:
    """The page for these models; example pictures are written to a folder of the server's own."""
    with Page(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.HTML(HEADLINE)
        _show_training(models)
        with gr.Row(elem_classes="sot-columns"):
            with gr.Column(scale=1, min_width=300, elem_classes="sot-input"):
                inputs = _inputs(models, folder)
            with gr.Column(scale=3, min_width=300, elem_classes="sot-output"), gr.Row(elem_classes="sot-results"):
                outputs = [gr.HTML(GREETING, elem_id="left", min_height=300), gr.HTML(visible=False, elem_id="right")]
        _follow_model(models, inputs)
        _explain_on_demand(models, inputs, outputs)
    return page


def _show_training(models: Mapping[str, Shown]) -> None:
    """How far a model is that is still trained, until it is there."""
    training = next((shown.awaited for shown in models.values() if shown.awaited is not None), None)
    if training is None:
        return
    bar = gr.HTML(training_bar(0), elem_id="training")

    def tell() -> Iterator[Any]:
        """The bar as it grows."""
        while not training.wait(0.3):
            yield training_bar(training.share)
        yield gr.update(visible=False)

    gr.on(None, tell, None, bar, api_visibility="private", show_progress="hidden", concurrency_limit=None)


# --- layout ------------------------------------------------------------------------------------------------


def _inputs(models: Mapping[str, Shown], folder: Path) -> PageInputs:
    first = next(iter(models.values()))
    free: dict[str, Any] = {"allow_custom_value": True}  # what is accepted changes with the model; ours to check
    model = gr.Dropdown([*models], value=first.name, label="Model", filterable=False, elem_id="model")
    rivals = _rivals(models, first)
    other = gr.Dropdown(rivals, value=NONE, label="Compare with", elem_id="other", visible=len(models) > 1, **free)
    with gr.Column(visible=first.modality == "image") as picture_side:
        picture = gr.Image(
            type="filepath",
            sources=["upload", "clipboard"],
            label="Image",
            height=240,
            buttons=[],
            elem_id="picture",
            placeholder="Drop an image here\nor click to upload",
        )
        # Gradio would open the file itself; what opens it is ours, with its limits. (A subclass of a component makes
        # gradio write a .pyi file beside this one.)
        object.__setattr__(picture, "preprocess", lambda payload: None if payload is None else payload.path)
    with gr.Column(visible=first.modality == "text") as text_side:
        text = gr.Textbox(label="Sentence", lines=3, max_lines=8, elem_id="text")
        pair = gr.Textbox(label="Second sentence, for a model of pairs", lines=1, max_lines=8, elem_id="pair")
    button = gr.Button("Explain", variant="primary", elem_id="explain")
    examples = _examples(models, first, picture, text, folder)
    with gr.Accordion("Options", open=False):
        target = gr.Dropdown([PREDICTED, *first.labels], value=PREDICTED, label="Class to explain", **free)
        truth = gr.Dropdown([UNKNOWN, *first.labels], value=UNKNOWN, label="True class", **free)
        method = gr.Dropdown(_methods(first), value=DEFAULT, label="Method", **free)
    sides = [picture_side, text_side]
    return PageInputs(model, other, picture, text, pair, method, target, truth, button, sides, examples)


def _rivals(models: Mapping[str, Shown], chosen: Shown) -> list[str]:
    """The models that read what the chosen one reads."""
    return [NONE, *(each.name for each in models.values() if each.modality == chosen.modality and each is not chosen)]


def _methods(chosen: Shown) -> list[str]:
    return [DEFAULT, *(TEXT_METHODS if chosen.modality == "text" else IMAGE_METHODS)]


def _example_kind(chosen: Shown) -> str:
    return "texts" if chosen.modality == "text" else " ".join(example_pictures(chosen.labels))


def _examples(models: Mapping[str, Shown], first: Shown, picture: Any, text: Any, folder: Path) -> dict[str, Any]:
    """A group for every kind of model, of which that of the first model is shown."""
    found: dict[str, Any] = {}
    for shown in models.values():
        kind = _example_kind(shown)
        if kind in found:
            continue
        look = ["sot-examples", "sot-sentences"] if shown.modality == "text" else ["sot-examples"]
        with gr.Column(visible=kind == _example_kind(first), elem_classes=look) as group:
            if shown.modality == "text":
                made = gr.Examples([[sentence] for sentence in SENTENCES], text, label="Examples")
            else:
                files = []
                for name, image in example_pictures(shown.labels).items():
                    image.save(folder / f"{name}.png")
                    files.append([str(folder / f"{name}.png")])
                made = gr.Examples(files, picture, label="Examples", examples_per_page=12)
        found[kind] = (group, made)
    return found


# --- events ------------------------------------------------------------------------------------------------


def _follow_model(models: Mapping[str, Shown], inputs: PageInputs) -> None:
    """Everything that depends on the model changes with it."""

    def change(name: str) -> list[Any]:
        chosen = models[name]
        return [
            gr.update(choices=_rivals(models, chosen), value=NONE),
            gr.update(visible=chosen.modality == "image"),
            gr.update(visible=chosen.modality == "text"),
            gr.update(choices=[PREDICTED, *chosen.labels], value=PREDICTED),
            gr.update(choices=[UNKNOWN, *chosen.labels], value=UNKNOWN),
            gr.update(choices=_methods(chosen), value=DEFAULT),
            *(gr.update(visible=kind == _example_kind(chosen)) for kind in inputs.examples),
        ]

    groups = [group for group, _ in inputs.examples.values()]
    changed = [inputs.other, *inputs.sides, inputs.target, inputs.truth, inputs.method, *groups]
    inputs.model.change(change, inputs.model, changed, api_visibility="private", show_progress="hidden")


def _explain_on_demand(models: Mapping[str, Shown], inputs: PageInputs, outputs: list[Any]) -> None:
    """By the button, by an upload, by an example."""

    def explain(
        model: str, other: str, picture: Any, text: str, pair: str, method: str, target: str, truth: str
    ) -> list[Any]:
        """Explain an image or a text by one model, or by two side by side."""
        return answers(models, model, other, picture, text, pair, method, target, truth)

    given = inputs.values()
    one: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "explain"}
    hidden: dict[str, Any] = {"api_visibility": "private"}
    events = [inputs.button.click(explain, given, outputs, api_name="explain", **one)]
    typed = [inputs.picture.upload, inputs.text.submit, inputs.pair.submit]
    events.append(gr.on(typed, explain, given, outputs, **hidden, **one))
    for _, made in inputs.examples.values():
        events.append(made.load_input_event.success(explain, given, outputs, **hidden, **one))
    for event in events:
        event.then(None, js=SCROLL, **hidden)


def answers(models: Mapping[str, Shown], model: str, other: str | None, *rest: Any) -> list[Any]:
    """The result of the model and, if another is asked for, of that."""
    wanted = [model] if other in (None, "", NONE) else [model, other]
    for name in wanted:
        if name not in models:
            return [refusal(f"there is no model {str(name)[:80]!r} here"), gr.update(value="", visible=False)]
    found = [answer(models[str(name)], *rest) for name in wanted]
    return [found[0], gr.update(value=found[1], visible=True) if found[1:] else gr.update(value="", visible=False)]
