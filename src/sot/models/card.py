"""The card of a model: what it is, how good it was, how to load it, and what that needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, HfApi, ModelCardData

from sot.core.head import HeadConfig
from sot.extras import DISTRIBUTION
from sot.files import as_markdown, visible, write_atomically

if TYPE_CHECKING:
    from sot.models.configuration import SoTConfig

PLURALS = {"image": "images", "text": "texts", "audio": "sounds"}
MOST_LABELS = 20  # that a card lists


def card(title: str, labels: list[str], modality: str, head: Mapping[str, Any], about: str = "", **facts: Any) -> str:
    """README.md of a model; `facts` may be `metrics` by name, `by_class` (those of each class) and their `dataset`."""
    metrics: Mapping[str, float] = facts.get("metrics") or {}
    return f"""---
{_metadata(title, f"{modality}-classification", metrics, str(facts.get("dataset", "")))}
---
# {as_markdown(title)}

{about or f"A transformer for {PLURALS[modality]} with a second-order head."} Head: {_settings(head)}.
{_table(metrics)}{_class_table(facts.get("by_class") or {})}
Classes: {_listed(labels)}.

## How to load it

You need the Python package `{DISTRIBUTION}`: install it from a checkout of its source with `pip install .`.
Then `import sot` before you load the model:

```python
import sot
from transformers import AutoModel, pipeline

classify = pipeline("{modality}-classification", "this folder")
features = AutoModel.from_pretrained("this folder")          # pooler_output: what the head reads
```

Without the package, or without `import sot`, transformers stops with "The checkpoint you are trying to load has model
type `{DISTRIBUTION}` but Transformers does not recognize this architecture". That type is the name of the
package to install. Updating transformers does not help.
The folder holds weights (safetensors) and settings (JSON). It holds no code, so `trust_remote_code` has no use.
"""


def _metadata(title: str, task: str, metrics: Mapping[str, float], dataset: str) -> str:
    """The head of a card that the hub reads; scores are its `model-index`."""
    title, dataset = (visible(" ".join(text.split())) for text in (title, dataset))
    found = [
        EvalResult(task, dataset_type="custom", dataset_name=dataset, metric_type=name, metric_value=round(value, 6))
        for name, value in metrics.items()
    ]
    facts: dict[str, Any] = {"model_name": title, "eval_results": found} if found else {}
    tags = ["sot", "second-order"]
    return ModelCardData(library_name="transformers", pipeline_tag=task, tags=tags, **facts).to_yaml()


def _table(metrics: Mapping[str, float]) -> str:
    rows = "".join(f"| {name} | {value:.4f} |\n" for name, value in metrics.items())
    return f"\n| validation | |\n|---|---|\n{rows}" if rows else ""


def _class_table(by_class: Mapping[str, Mapping[str, float]]) -> str:
    """Scores of every class; of many classes only the worst."""
    worst = sorted(by_class.items(), key=lambda item: item[1]["f1"])[:MOST_LABELS]
    shown = by_class.items() if len(by_class) <= MOST_LABELS else worst
    rows = "".join(
        f"| {as_markdown(name)} | {row['samples']} | {row['precision']:.3f} | {row['recall']:.3f} | {row['f1']:.3f} |\n"
        for name, row in shown
    )
    which = "class" if len(by_class) <= MOST_LABELS else f"class (lowest F1 of {len(by_class)})"
    return f"\n| {which} | samples | precision | recall | F1 |\n|---|---|---|---|---|\n{rows}" if rows else ""


def _listed(labels: list[str]) -> str:
    more = ", …" if len(labels) > MOST_LABELS else ""
    return ", ".join(map(as_markdown, labels[:MOST_LABELS])) + more


def _settings(head: Mapping[str, Any]) -> str:
    """The settings of a head that are not the usual ones of its pooling."""
    usual = HeadConfig(pool=head["pool"], fusion=head["fusion"]).to_dict()
    named = ["fusion"] if head["fusion"] == "class" else ["fusion", "pool"]
    return ", ".join(f"{name} {value}" for name, value in head.items() if value != usual[name] or name in named)


def write_card(config: SoTConfig, folder: str | Path) -> None:
    """Leave a card in the folder of a model, unless there is one."""
    file = Path(folder) / "README.md"
    if not file.exists():
        write_atomically(file, card_of(config))


def upload(
    model: Any,
    repo_id: str,
    *,
    commit_message: str = "Upload model",
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    **saving: Any,
) -> str:
    """Save a model into a repository of the hub, made if need be; `saving` are arguments of `save_pretrained`."""
    hub = HfApi(token=token)
    repo = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
    kept = ["README.md"] if hub.file_exists(repo, "README.md", revision=revision) else []
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, **saving)
        done = hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            ignore_patterns=kept,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    return str(done)


def card_of(config: SoTConfig) -> str:
    """The card of a model that nobody has scored."""
    backbone = config.backbone_config
    name = getattr(backbone, "architecture", None) or getattr(backbone, "model_type", "backbone")
    labels = [str(config.id2label[index]) for index in range(config.num_labels)]
    return card(f"{name} with a second-order head", labels, str(config.modality), config.head or {})
