"""What people use without any head of ours: the most frequent class, and scikit-learn's logistic regression."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import normalize

from sot.core.head import HeadConfig
from sot.probe.features import Array, Features
from sot.probe.fitting import Target
from sot.probe.heads import representations, standardising_head


def plain_outputs(name: str, train: Features, rows: Array, test: Features, target: Target) -> Array:
    """Logits `(test samples, outputs)` of the `majority`, or of a `logreg` on averages of unit length."""
    labels = train.labels[rows]
    if name == "majority":
        share = target.one_hot(labels).mean(0).numpy()
        constant = share if target.link == "identity" else np.log(share.clip(1e-9))
        return np.repeat(constant[None], len(test.rows), axis=0)
    as_they_are = torch.zeros(train.dim), torch.ones(train.dim)
    average = standardising_head(HeadConfig(pool="gap", fusion="word", pre_norm=True), 0, as_they_are)
    fit, score = (normalize(representations(average, *each).numpy()) for each in ((train, rows), (test, test.rows)))
    if target.link == "identity":
        return Ridge().fit(fit, labels).predict(score)[:, None]
    model = LogisticRegression(max_iter=1000).fit(fit, labels.astype(int))
    outputs = np.full((len(score), target.num_outputs), -np.inf)
    outputs[:, model.classes_] = model.predict_log_proba(score)
    return np.maximum(outputs, -50.0)  # of classes that no sample had
