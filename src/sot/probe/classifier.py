"""`sot.Classifier`: a scikit-learn estimator of a backbone with a second-order head."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from sot.evaluation.predict import probabilities
from sot.lines import bars, with_lines
from sot.models.equip import Equipped
from sot.probe.adapt import ADAPTATIONS, Adaptation, advice, check_contrast, train_all
from sot.probe.budget import Budget
from sot.probe.features import Array, Features
from sot.probe.fitting import Target, choose_settings, train_head
from sot.probe.frozen import FrozenBackbone, open_backbone, save_model, with_head
from sot.probe.heads import choose_heads, standardising_head, token_statistics
from sot.probe.inputs import as_items, read_inputs
from sot.probe.second_order import FittedHead, fit_second_order
from sot.probe.store import TokenStore

logger = logging.getLogger("sot")
BATCH = 64
SECONDS_A_LINE = 10.0  # of progress where no bar can move, as in notebooks
shared_backbone = lru_cache(maxsize=2)(open_backbone)  # clones of an estimator read with the same one


class Classifier(ClassifierMixin, TransformerMixin, BaseEstimator):
    """Classify texts, pairs of texts, images or sounds with a pretrained backbone, frozen by default.

    Args:
        model: A timm name, a Hugging Face hub name, or a folder.
        head: A head of `sot probe`. None lets cross-validation choose what is read of the tokens.
        adapt: "contrastive" (texts) or "finetune" train the backbone too; None leaves it frozen, which is fast.
        adapt_steps: Most steps that adapting takes.
        depth: Keep the first `depth` layers of the backbone.
        pretrained: Whether a name loads pretrained weights.
        weights: File of weights for a timm name, in place of the published ones.
        img_size: Build a timm model for images of this size.
        max_length: Most tokens of a text.
        cache: "memory" or a folder keeps tokens for the next fit of the same samples; None does not.
        random_state: Seed of folds and training.
        verbose: 1 prints progress and choices, 0 nothing.

    After `fit`, `classes_` holds the labels as they came, `model_` what `save` writes, `fitted_` the choice of head.
    """

    def __init__(
        self,
        model: str | Path = "sentence-transformers/all-MiniLM-L6-v2",
        *,
        head: str | None = None,
        adapt: str | None = None,
        adapt_steps: int = 150,
        depth: int | None = None,
        pretrained: bool = True,
        weights: str | Path | None = None,
        img_size: int | None = None,
        max_length: int = 128,
        cache: str | Path | None = "memory",
        random_state: int = 0,
        verbose: int = 1,
    ) -> None:
        self.model = model
        self.head = head
        self.adapt = adapt
        self.adapt_steps = adapt_steps
        self.depth = depth
        self.pretrained = pretrained
        self.weights = weights
        self.img_size = img_size
        self.max_length = max_length
        self.cache = cache
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> Classifier:
        """Fit the head, and with `adapt` the backbone, on samples and their labels."""
        with bars(self.verbose > 0):
            return self._fit(X, y)

    def _fit(self, X: Any, y: Any) -> Classifier:
        self._check_settings()
        items = as_items(X)
        targets = self._encode(y, len(items))
        backbone = self._backbone()
        inputs = read_inputs(backbone, X, self.max_length)
        if self.adapt == "contrastive":
            check_contrast(backbone)
        labels = targets.numpy() if self._target().multi_label else targets.argmax(1).double().numpy()
        frozen, adapted = TokenStore(backbone, self._store()).features(inputs, labels, self._progress), None
        if self.adapt == "contrastive":
            from sot.probe.contrast import contrast

            self._say(f"Adapting {self.model} by contrast, {self.adapt_steps} steps at most.")
            backbone = contrast(backbone, items, targets, self._adaptation())
            inputs = read_inputs(backbone, X, self.max_length)
            adapted = TokenStore(backbone, False).features(inputs, labels, self._progress)
        self._say(f"Fitting the head on {len(inputs)} samples.")
        began = time.perf_counter()
        self.fitted_ = self._fit_head(frozen, adapted, targets)
        self._report(backbone.config.modality, len(inputs), time.perf_counter() - began)
        names = [str(name) for name in self.classes_]
        self.model_ = with_head(backbone, self.fitted_.head, names, self._problem())
        if self.model_.config.modality == "text":
            self.model_.config.text_pairs = isinstance(items[0], tuple | list)
            self.model_.processor.model_max_length = self.max_length  # saved, so that pipelines cut texts likewise
        if self.adapt == "finetune":
            self._say(f"Training all of {self.model}, {self.adapt_steps} steps at most.")
            train_all(self.model_, inputs, targets, self._adaptation())
        return self

    @property
    def partial_fit(self) -> Any:
        """Refused: settings are chosen by cross-validation of all samples."""
        raise AttributeError(
            "Classifier has no partial_fit: it chooses its settings by cross-validation of all samples, so call fit"
        )

    def predict(self, X: Any) -> Array:
        """Labels `(samples,)` as `fit` got them; multi-label: an indicator matrix `(samples, classes)`."""
        scores = self.predict_proba(X)
        if self._target().multi_label:
            return (scores > 0.5).astype(int)
        return self.classes_[scores.argmax(1)]

    def predict_proba(self, X: Any) -> Array:
        """Probabilities `(samples, classes)`: softmax, or sigmoid (multi-label)."""
        logits = self._run(X, lambda model, batch: model(**batch).logits)
        return probabilities(self.model_.config, logits.double()).numpy()

    def decision_function(self, X: Any) -> Array:
        """Logits `(samples, classes)`; of two classes their difference `(samples,)`, as in scikit-learn."""
        logits = self._run(X, lambda model, batch: model(**batch).logits).double().numpy()
        is_binary = logits.shape[1] == 2 and not self._target().multi_label
        return logits[:, 1] - logits[:, 0] if is_binary else logits

    def transform(self, X: Any) -> Array:
        """Features `(samples, features)` that the linear layers read: class token, then pooled words."""

        def represent(model: Any, batch: dict[str, Tensor]) -> Tensor:
            tokens = model.tokens(**batch).to(next(model.classifier.parameters()).dtype)
            return model.classifier(tokens.class_token, tokens.word_tokens, tokens.mask, pre_logits=True)

        return self._run(X, represent).numpy()

    def explain(self, x: Any, **options: Any) -> Any:
        """Explain the prediction for one text, pair, image or sound; see `sot.explain.explain_item`."""
        from sot.explain import explain_item
        from sot.probe.inputs import as_picture

        check_is_fitted(self, "model_")
        item = tuple(x) if isinstance(x, list) else x
        if self.model_.config.modality == "image":
            item = as_picture(item)
        return explain_item(self.model_, self.model_.processor, item, **options)

    def save(self, folder: str | Path) -> None:
        """Write a model folder for `pipeline`, `AutoModelFor…`, `sot predict` and the other commands."""
        check_is_fitted(self, "model_")
        run = {"command": "fit", "model": str(self.model), "data": None, "head": self.model_.config.head}
        with bars(self.verbose > 0):
            save_model(self.model_, Path(folder), run)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        tags.classifier_tags.multi_label = True
        tags.transformer_tags.preserves_dtype = []
        tags.no_validation = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    # --- settings and labels -------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        if self.adapt is not None and self.adapt not in ADAPTATIONS:
            raise ValueError(f"unknown adapt {self.adapt!r}; accepted: None, {', '.join(map(repr, ADAPTATIONS))}")
        for name in ("max_length", "adapt_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")

    def _encode(self, y: Any, count: int) -> Tensor:
        """Targets `(samples, classes)`; sets `classes_`."""
        values = y.to_numpy() if hasattr(y, "to_numpy") else np.asarray(y)
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if count == 0:
            raise ValueError("X is empty: at least one sample is needed")
        if len(values) != count:
            raise ValueError(f"X has {count} samples, and y {len(values)}")
        check_classification_targets(values)
        if type_of_target(values) == "multilabel-indicator":
            columns = getattr(y, "columns", range(values.shape[1]))
            self.classes_ = np.asarray(list(columns))
            self.multilabel_ = True
            return torch.tensor(np.asarray(values, dtype=np.float32))
        encoder = LabelEncoder()
        numbers = encoder.fit_transform(values)
        self.classes_, self.multilabel_ = encoder.classes_, False
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_.tolist()[0]!r}: at least 2 are needed")
        return torch.eye(len(self.classes_))[torch.from_numpy(numbers)]

    def _target(self) -> Target:
        return Target(len(self.classes_), multi_label=self.multilabel_)

    def _problem(self) -> str:
        return "multi_label_classification" if self.multilabel_ else "single_label_classification"

    def _backbone(self) -> Equipped:
        weights = None if self.weights is None else Path(self.weights)
        return shared_backbone(FrozenBackbone(str(self.model), self.pretrained, weights, self.img_size, self.depth))

    def _store(self) -> Path | bool | None:
        if self.cache is None:
            return False
        return None if self.cache == "memory" else Path(self.cache)

    def _adaptation(self) -> Adaptation:
        return Adaptation(self.adapt_steps, self.random_state, self.max_length, self.verbose > 0)

    # --- work ----------------------------------------------------------------------------------------------

    def _fit_head(self, frozen: Features, adapted: Features | None, targets: Tensor) -> FittedHead:
        """Settings by cross-validation of frozen tokens: an adapted backbone has seen what would be held out."""
        target, rows, seed = self._target(), frozen.rows, self.random_state
        if self.head is None:
            return fit_second_order(frozen, rows, targets, target, adapted=adapted, seed=seed)
        config = choose_heads([self.head], frozen.dim, frozen.class_tokens is not None)[self.head]
        if config is None:
            raise ValueError(f"head {self.head!r} is no head to be trained; None fits what sot probe calls sot")
        choice = choose_settings(config, frozen, rows, token_statistics(frozen), target, Budget())
        features = frozen if adapted is None else adapted
        head = standardising_head(config, len(self.classes_), token_statistics(features), seed)
        train_head(head, features, rows, target, Budget(), choice.learning_rate, choice.weight_decay, seed)
        return FittedHead(head, None)

    def _report(self, modality: str, count: int, seconds: float) -> None:
        """What was chosen, and whether adapting would pay."""
        chosen = self.fitted_.chosen
        if chosen is None:
            return self._say(f"Trained the head {self.head} on {count} samples in {seconds:.1f} s.")
        trained = ", all of it trained from there" if self.fitted_.is_trained else ""
        what = f"Chose {chosen.mixture}, penalty {chosen.penalty:g}, of {chosen.settings} settings{trained}"
        held_out = "held out before adapting" if self.adapt == "contrastive" else "held out"
        self._say(f"{what}, in {seconds:.1f} s: {100 * chosen.score:.1f} % of {count} samples right when {held_out}.")
        note = None if self.adapt else advice(modality, count / len(self.classes_), chosen.score)
        if note is not None:
            self._say(note)

    @torch.inference_mode()
    def _run(self, X: Any, call: Any) -> Tensor:
        """Batches of like lengths through the model; the results in the order of X."""
        check_is_fitted(self, "model_")
        inputs = read_inputs(self.model_, X, self.max_length)
        order = sorted(range(len(inputs)), key=inputs.lengths.__getitem__)
        chunks = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        device = self.model_.device
        parts = [
            call(self.model_, {name: value.to(device) for name, value in inputs.batch(chunk).items()}).float().cpu()
            for chunk in chunks
        ]
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy_(0, torch.tensor(order), found)

    def _say(self, sentence: str) -> None:
        if self.verbose:
            Console(stderr=True, soft_wrap=True).print(sentence, markup=False, highlight=False)

    def _progress(self, items: Sequence[Any], title: str) -> Iterable[Any]:
        if not self.verbose:
            return items
        console = Console(stderr=True)
        if console.is_terminal:
            return track(items, title, console=console, transient=True)
        self._say(f"{title}: {len(items)} {'batch' if len(items) == 1 else 'batches'}.")
        return with_lines(items, title, len(items), self._say, SECONDS_A_LINE)
