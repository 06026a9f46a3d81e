"""`sot.Classifier`: an estimator of scikit-learn whose inputs are texts and pictures."""

import itertools
import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks, get_tags
from test_cli import sot as run
from transformers import AutoModelForSequenceClassification, pipeline

import sot
from sot.bench.timing import thread_count
from sot.probe import store
from sot.probe.adapt import BATCH
from sot.probe.classifier import shared_backbone
from sot.probe.contrast import AllPairs, balanced_batches

WORDS = ["the", "cat", "cats", "sleep", "sleeps"]


@pytest.fixture(autouse=True)
def one_thread():
    with thread_count(1):
        yield


def texts(count, seed=0):
    """Sentences with or without a cat, and that as their label."""
    draw = np.random.default_rng(seed)
    found = [" ".join(draw.choice(WORDS, draw.integers(3, 9))) for _ in range(count)]
    return found, np.array(["cat" if "cat" in text.split() else "none" for text in found])


@pytest.fixture
def bert(stand_ins):
    return stand_ins["google-bert/bert-base-uncased"]


def classifier(model, **settings):
    return sot.Classifier(model, verbose=0, **settings)


# --- what comes in and out -----------------------------------------------------------------------------------


def test_labels_come_back_as_they_were_given(bert):
    found, names = texts(60)
    for labels in (
        names,
        names.tolist(),
        (names == "cat").astype(int) + 5,
        names == "cat",
        [bool(n == "cat") for n in names],
    ):
        fitted = classifier(bert).fit(found, labels)
        predicted = fitted.predict(found)
        assert predicted.dtype == np.asarray(labels).dtype and set(predicted) <= set(labels)
        assert fitted.score(found, labels) >= 0.9
        scores = fitted.predict_proba(found)
        assert scores.shape == (60, 2) and np.allclose(scores.sum(1), 1)
        assert (fitted.classes_[scores.argmax(1)] == predicted).all()
        assert np.array_equal(fitted.decision_function(found) > 0, predicted == fitted.classes_[1])
    assert fitted.transform(found).shape[0] == 60


def test_pairs_may_be_tuples_lists_arrays_or_two_columns(bert):
    pandas = pytest.importorskip("pandas")
    first, labels = texts(40)
    second, _ = texts(40, seed=1)
    pairs = list(zip(first, second))
    expected = classifier(bert).fit(pairs, labels).predict_proba(pairs)
    for given in (list(map(list, pairs)), np.array(pairs), pandas.DataFrame(pairs)):
        assert np.allclose(classifier(bert).fit(given, labels).predict_proba(given), expected)
    assert not np.allclose(classifier(bert).fit(first, labels).predict_proba(first), expected)


def stripes(count, seed=0):
    draw = np.random.default_rng(seed)
    lines = draw.integers(0, 255, (count, 160, 1, 3), dtype=np.uint8).repeat(160, 2)
    return [np.ascontiguousarray(each.transpose(1, 0, 2) if row % 2 else each) for row, each in enumerate(lines)]


def test_pictures_may_be_arrays_of_pillow_or_files(stand_ins, tmp_path):
    arrays, labels = stripes(24), ["down" if row % 2 else "across" for row in range(24)]
    files = [tmp_path / f"{row}.png" for row in range(24)]
    for file, array in zip(files, arrays):
        Image.fromarray(array).save(file)
    fitted = classifier(stand_ins["vit_small_patch16_224"]).fit(arrays, labels)
    expected = fitted.predict_proba(arrays)
    for given in (np.stack(arrays), list(map(Image.fromarray, arrays)), files, list(map(str, files))):
        assert np.allclose(fitted.predict_proba(given), expected, atol=1e-6)
    assert fitted.explain(files[0]).target in ("down", "across")
    with pytest.raises(ValueError, match="for texts, and this model reads images"):
        classifier(stand_ins["vit_small_patch16_224"], adapt="contrastive").fit(arrays, labels)


def test_several_labels_are_an_indicator_matrix(bert, tmp_path):
    found, _ = texts(80)
    labels = np.array([[word in text.split() for word in ("cat", "sleeps", "the")] for text in found]).astype(int)
    fitted = classifier(bert).fit(found, labels)
    assert fitted.classes_.tolist() == [0, 1, 2]
    scores = fitted.predict_proba(found)
    assert scores.shape == (80, 3) and np.array_equal(fitted.predict(found), scores > 0.5)
    assert (fitted.predict(found) == labels).mean() > 0.85
    fitted.save(tmp_path / "model")
    classify = pipeline("text-classification", str(tmp_path / "model"), top_k=None)
    by_name = {row["label"]: row["score"] for row in classify(found[:1])[0]}
    assert [by_name[str(name)] for name in fitted.classes_] == pytest.approx(scores[0].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("given", "labels", "settings", "message"),
    [
        ("one text", [1], {}, "X is a list of samples, got one str"),
        ([], [], {}, "X is empty"),
        (["a", "b"], [1], {}, "X has 2 samples, and y 1"),
        (["a", "b"], [1, 1], {}, "y has one class, 1: at least 2"),
        (["a", 3.5], [1, 2], {}, "X\\[1\\] must be a text or a pair of texts, got float"),
        ([("a", "b", "c"), ("a", "b", "c")], [1, 2], {}, "must be a text or a pair of texts, got 3 things"),
        ([("a", "b"), "c"], [1, 2], {}, "1 pairs among 2 samples"),
        (["a", "b"], [0.5, 1.7], {}, "Unknown label type: continuous"),
        (["a", "b"], [1, 2], {"adapt": "lora"}, "unknown adapt 'lora'; accepted: None, 'contrastive', 'finetune'"),
        (["a", "b"], [1, 2], {"max_length": 0}, "max_length must be an integer >= 1, got 0"),
        (["a", "b"], [1, 2], {"head": "best"}, "unknown head 'best'"),
    ],
)
def test_what_is_wrong_is_said(bert, given, labels, settings, message):
    with pytest.raises(ValueError, match=message):
        classifier(bert, **settings).fit(given, labels)


def test_partial_fit_is_refused_in_a_sentence(bert):
    assert not hasattr(classifier(bert), "partial_fit")
    with pytest.raises(AttributeError, match="Classifier has no partial_fit: it chooses its settings by cross"):
        classifier(bert).partial_fit(["a"], [1])


# --- scikit-learn --------------------------------------------------------------------------------------------


def test_it_is_cloned_searched_and_put_into_pipelines(bert):
    found, labels = texts(60)
    fitted = classifier(bert, max_length=32).fit(found, labels)
    copied = clone(fitted)
    assert copied.get_params() == fitted.get_params() and not hasattr(copied, "model_")
    assert copied.set_params(max_length=16).max_length == 16
    assert cross_val_score(classifier(bert), found, labels, cv=3).mean() > 0.8
    search = GridSearchCV(classifier(bert), {"head": [None, "gap"]}, cv=2).fit(found, labels)
    assert set(search.best_params_) == {"head"} and search.score(found, labels) > 0.8
    piped = make_pipeline(FunctionTransformer(lambda rows: [row.lower() for row in rows]), classifier(bert))
    shouted = [text.upper() for text in found]
    assert piped.fit(shouted, labels).score(shouted, labels) >= 0.9
    calibrated = CalibratedClassifierCV(classifier(bert), cv=2).fit(found, labels)
    assert np.allclose(calibrated.predict_proba(found[:4]).sum(1), 1)


class Table(sot.Classifier):
    """Reads rows of numbers as sentences, so that scikit-learn's checks have something to give it."""

    def __init__(self, model="", *, max_length=16, cache="memory", random_state=0, verbose=0):
        super().__init__(model, max_length=max_length, cache=cache, random_state=random_state, verbose=verbose)

    def fit(self, X, y):
        return super().fit(self.sentences(X), y)

    def _run(self, X, call):
        return super()._run(self.sentences(X), call)

    @staticmethod
    def sentences(rows):
        levels = np.clip(np.asarray(rows, dtype=float).reshape(len(rows), -1) + 2, 0, 4).astype(int)
        return [" ".join(WORDS[level] for level in row[:8]) for row in levels]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.string = True, False
        return tags


NO_TABLE = "samples are texts or pictures, and no table of numbers is validated"
EXCEPTIONS = {
    "check_estimator_sparse_tag": NO_TABLE,
    "check_estimator_sparse_array": NO_TABLE,
    "check_estimator_sparse_matrix": NO_TABLE,
    "check_classifier_data_not_an_array": "a sequence has a length",
    "check_transformer_general": "texts may be of any length, so that there is no number of features to compare",
    "check_methods_subset_invariance": "asks for 1e-7, and float32 rounds otherwise in another batch",
}
CHECKS = [check for _, check in estimator_checks.estimator_checks_generator(Table(), legacy=True)]


@pytest.mark.parametrize("check", CHECKS, ids=estimator_checks._check_name)
@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn(check, bert, request):
    reason = EXCEPTIONS.get(estimator_checks._check_name(check))
    if reason:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    check(Table(bert))


def test_its_tags_say_what_it_reads(bert):
    tags = get_tags(classifier(bert))
    assert tags.input_tags.string and not tags.input_tags.two_d_array and tags.classifier_tags.multi_label
    with pytest.warns(UserWarning, match="requires input"):
        assert not list(estimator_checks._yield_all_checks(classifier(bert), legacy=True))


# --- tokens, words and folders -------------------------------------------------------------------------------


def test_tokens_are_computed_once_in_memory_and_in_a_folder(bert, tmp_path, monkeypatch, caplog):
    found, labels = texts(40)
    passes = []
    encode = store.encode
    monkeypatch.setattr(
        store, "encode", lambda model, batch: passes.append(len(batch["input_ids"])) or encode(model, batch)
    )
    monkeypatch.setattr(store, "_kept", type(store._kept)())
    first = classifier(bert).fit(found, labels)
    assert sum(passes) == len(set(found))
    again = classifier(bert, head="gap").fit(found[:30], labels[:30])
    assert sum(passes) == len(set(found)) and again.fitted_.chosen is None
    kept = classifier(bert, cache=tmp_path).fit(found, labels)
    assert sum(passes) == 2 * len(set(found)) and np.allclose(kept.predict_proba(found), first.predict_proba(found))
    classifier(bert, cache=str(tmp_path)).fit(found, labels)
    assert sum(passes) == 2 * len(set(found))
    (file,) = tmp_path.glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, "sot"):
        classifier(bert, cache=tmp_path).fit(found, labels)
    assert "is damaged" in caplog.text and sum(passes) == 3 * len(set(found))
    classifier(bert, cache=None).fit(found, labels)
    assert sum(passes) == 4 * len(set(found))
    monkeypatch.setattr(store, "MEMORY", 0)
    classifier(bert).fit(found[:3], [0, 1, 0])
    assert not store._kept


def test_fit_says_what_it_does_unless_it_is_to_be_quiet(bert, capfd, monkeypatch, tmp_path):
    found, labels = texts(30)
    draw = np.random.default_rng(0).permutation(labels)  # nothing to learn
    shared_backbone.cache_clear()  # the weights are loaded, of which transformers shows a bar
    classifier(bert, cache=None).fit(found, draw).save(tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    shared_backbone.cache_clear()
    sot.Classifier(bert, cache=None).fit(found, draw)
    said = capfd.readouterr().err
    assert "Loading weights" not in said, "a bar moves on terminals only"
    assert "Computing tokens: 1 batch." in said and "Fitting the head on 30 samples." in said
    assert "when held out" in said and 'adapt="contrastive" is likely to pay' in said
    assert "left" not in said, "that was quick"
    monkeypatch.setattr("sot.probe.classifier.SECONDS_A_LINE", 0.0)
    sot.Classifier(bert, cache=None).fit(found, draw)
    assert "Computing tokens: 1 of 1, 0 s left" in capfd.readouterr().err, "in logs and notebooks, too"


def test_the_saved_folder_gives_the_same_probabilities(bert, tmp_path):
    found, labels = texts(60)
    fitted = classifier(bert).fit(found, labels)
    fitted.save(tmp_path / "model")
    expected = fitted.predict_proba(found[:5])
    classify = pipeline("text-classification", str(tmp_path / "model"), top_k=None)
    for row, scores in zip(expected, classify(found[:5])):
        by_name = {each["label"]: each["score"] for each in scores}
        assert [by_name[name] for name in fitted.classes_] == pytest.approx(row.tolist(), abs=1e-5)
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    encoded = fitted.model_.processor(found[:5], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert opened(**encoded).logits.softmax(-1).numpy() == pytest.approx(expected, abs=1e-5)
    said = json.loads(run("predict", tmp_path / "model", "--text", found[0], "--json").stdout)
    assert dict(said["classes"]) == pytest.approx(dict(zip(fitted.classes_, expected[0])), abs=1e-4)
    fitted.save(tmp_path / "model")  # what sot saved may be replaced
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="mine is not a model that sot saved"):
        fitted.save(tmp_path / "mine")
    explanation = fitted.explain(found[0])
    assert explanation.predictions[0][0] == fitted.predict(found[:1])[0]


# --- adapting ------------------------------------------------------------------------------------------------


def test_contrast_moves_the_backbone_and_leaves_the_shared_one_alone(bert, capfd):
    found, labels = texts(24)
    before = classifier(bert).fit(found, labels)
    weights = {name: value.clone() for name, value in before.model_.backbone.state_dict().items()}
    adapted = classifier(bert, adapt="contrastive", adapt_steps=3).fit(found, labels)
    assert adapted.fitted_.chosen == before.fitted_.chosen, "an adapted backbone has seen what would be held out"
    moved = adapted.model_.backbone.state_dict()
    assert any(not torch.equal(moved[name], value) for name, value in weights.items())
    after = before.model_.backbone.state_dict()
    assert all(torch.equal(after[name], value) for name, value in weights.items())
    pairs = [(text, text) for text in found]
    of_pairs = classifier(bert, head="class", adapt="contrastive", adapt_steps=2).fit(pairs, labels)
    assert of_pairs.predict(pairs).shape == (24,) and of_pairs.model_.config.head["fusion"] == "class"
    sot.Classifier(bert, adapt="contrastive", adapt_steps=1).fit(found, labels)
    assert "right when held out before adapting." in capfd.readouterr().err


def test_contrast_draws_classes_alike_and_every_text_before_one_again():
    labels = np.repeat([0, 1, 2], [3, 10, 5])
    rows = balanced_batches(torch.eye(3)[labels], 6, seed=1)
    assert len(rows) == 6 * BATCH and rows == balanced_batches(torch.eye(3)[labels], 6, seed=1)
    for start in range(0, len(rows), BATCH):
        assert np.bincount(labels[rows[start : start + BATCH]]).min() >= BATCH // 3
    of_second = [row for row in rows if labels[row] == 1]
    assert sorted(of_second[:10]) == list(range(3, 13))
    many = balanced_batches(torch.eye(40), 3, seed=1)  # more classes than a batch has texts: pairs all the same
    assert all(len(set(many[start : start + BATCH])) == BATCH // 2 for start in range(0, len(many), BATCH))
    several = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert set(balanced_batches(several, 2, seed=1)) == {0, 1}
    with pytest.raises(ValueError, match="y gives no sample a label"):
        balanced_batches(torch.zeros(3, 2), 2, seed=1)


def test_contrast_is_the_loss_of_all_pairs_of_a_batch():
    found, targets = torch.randn(6, 5), torch.eye(3)[[0, 0, 1, 1, 1, 2]]
    loss = AllPairs(lambda features: {"sentence_embedding": features["rows"]})
    alike, unlike = [], []
    for i, j in itertools.combinations(range(6), 2):
        cosine = torch.cosine_similarity(found[i], found[j], dim=0)
        same = targets[i] @ targets[j] > 0
        (alike if same else unlike).append((cosine - float(same)) ** 2)
    expected = (torch.stack(alike).mean() + torch.stack(unlike).mean()) / 2
    assert loss([{"rows": found}], targets) == pytest.approx(float(expected), abs=1e-6)
    kept = loss([{"rows": found[:2]}], targets[:2])  # of one class
    assert kept == pytest.approx(float(alike[0]), abs=1e-6)


@pytest.mark.parametrize("several", [False, True])
def test_fine_tuning_starts_from_the_fitted_head(bert, several):
    found, labels = texts(40)
    given = np.stack([labels == "cat", labels != "cat"], axis=1).astype(int) if several else labels
    frozen = classifier(bert).fit(found, given)
    weights = {name: value.clone() for name, value in frozen.model_.state_dict().items()}
    tuned = classifier(bert, adapt="finetune", adapt_steps=4).fit(found, given)
    moved = tuned.model_.state_dict()
    assert any(not torch.equal(moved[name], value) for name, value in weights.items() if name.startswith("backbone"))
    assert tuned.score(found, given) >= frozen.score(found, given) - 0.1
    assert all(torch.equal(value, weights[name]) for name, value in frozen.model_.state_dict().items())


def test_fine_tuning_pictures(stand_ins):
    arrays, labels = stripes(16), ["down" if row % 2 else "across" for row in range(16)]
    tuned = classifier(stand_ins["vit_small_patch16_224"], adapt="finetune", adapt_steps=2).fit(arrays, labels)
    assert tuned.predict(arrays[:2]).shape == (2,)
