"""Texts explained: pieces merged to words, pages of untrusted text, long texts, pairs, families."""

import io
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from sot.explain import BOTH, CLASS, WORDS, explain_item, explain_text, explaining, read_text, split_words
from sot.explain.words import token_influence, token_limit
from sot.models.equip import equip

HEAD = {"heads": 2, "left_dim": 4, "right_dim": 4, "norm": "svpn_fast"}
SENTENCES = ["the old cat sleeps near the tailors", "the kings laugh", "a famous singer hesitates"] * 5
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(sentences):
    """Word pieces: what is left of each word without a final s, that s, and letters; trained ones differ by chance."""
    stems = {word.removesuffix("s") for sentence in sentences for word in sentence.split()}
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = [*SPECIAL, *sorted(stems | set(letters)), *(f"##{letter}" for letter in letters)]
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=10**9, **names)


def byte_tokenizer():
    """Bytes with the space before a word as part of it, as GPT's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", model_max_length=10**9)


def make_bert(tokenizer):
    size = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    return BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **size, **still))


def make_gpt(tokenizer):
    still = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2Model(GPT2Config(vocab_size=len(tokenizer), n_embd=48, n_layer=2, n_head=4, n_positions=64, **still))


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    tokenizer = make_tokenizer(SENTENCES)
    return enlarge(equip(make_bert(tokenizer), labels=["no", "yes"], head=HEAD)), tokenizer


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    return enlarge(equip(make_gpt(tokenizer), labels=["no", "yes"], head=HEAD)), tokenizer


def enlarge(model):
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_pieces_are_merged_to_the_words_of_the_text(family, request):
    model, tokenizer = request.getfixturevalue(family)
    text = "the  tailors hesitate,  sleepily"
    words = split_words(model, tokenizer, text)
    assert "".join(words.names) == text.replace(" ", "")
    assert {"tailors", "sleepily"} <= set(words.names) and max(map(len, words.tokens)) > 1
    every = sorted([token for tokens in words.tokens for token in tokens] + words.special)
    assert every == list(range(words.encoded["input_ids"].shape[1]))
    values = np.random.default_rng(0).random((len(every), len(every)))
    merged = words.merge_pairs(values)
    assert merged[1, 2] == pytest.approx(values[np.ix_(words.tokens[1], words.tokens[2])].sum())


@pytest.mark.parametrize("family", ["bert", "gpt"])
@pytest.mark.parametrize("method", ["relevance", "gradient"])
def test_every_word_has_an_influence_through_every_branch(family, method, request):
    model, tokenizer = request.getfixturevalue(family)
    found = explain_text(model, tokenizer, "the old cat sleeps", "the kings laugh", method=method, truth="yes")
    assert [column.name for column in found.columns] == [CLASS, WORDS, BOTH]
    assert found.words.names == ["the", "old", "cat", "sleeps", "the", "kings", "laugh"]
    assert all(len(c.values) == 7 and c.strength.max() == 1 and c.strength.min() >= 0 for c in found.columns)
    assert all(column.correct == (column.predicted == "yes") for column in found.columns)
    parts = found.contributions
    assert parts.class_part + parts.word_part + parts.bias == pytest.approx(parts.logits, abs=1e-5)
    assert found.evidence.pairs.shape == (7, 7) and found.spectrum.before.shape == (2, 4)
    assert sum(score for _, score in found.predictions) == pytest.approx(1)


def test_gradient_times_embedding_is_the_derivative_by_the_size_of_the_embedding(bert):
    model, tokenizer = bert
    words = split_words(model, tokenizer, "the old cat sleeps")
    with explaining(model):
        reading = read_text(model, words.encoded)
        found = token_influence(model, reading, BOTH, 1, "gradient")
    ids, step = words.encoded["input_ids"], 1e-2
    embeddings = model.get_input_embeddings()(ids).detach()
    for token in (1, 3):
        scaled = [embeddings.clone(), embeddings.clone()]
        scaled[0][0, token] *= 1 + step
        scaled[1][0, token] *= 1 - step
        with torch.no_grad():
            up, down = (model(inputs_embeds=each).logits[0, 1].double() for each in scaled)
        assert found[token] == pytest.approx(float(up - down) / (2 * step), rel=0.02, abs=1e-3)


def test_the_branches_of_gradients_add_up(bert):
    found = explain_text(*bert, "the old cat sleeps", method="gradient")
    by_name = {column.name: column.values for column in found.columns}
    assert by_name[CLASS] + by_name[WORDS] == pytest.approx(by_name[BOTH], rel=1e-3, abs=1e-4)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        assert not any(name.startswith("on") for name, _ in attributes)


def test_a_page_is_whole_offline_and_never_runs_what_the_text_says(bert):
    text = "</mark><script>alert('1')</script> <img src=x onerror=alert(2)> & \" $x^{ $ the cat"
    page = explain_text(*bert, text).html()
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.names and page.count("<img") == 1
    assert not re.search(r"(?:src|href)=\"(?!data:image/png;base64,)", page)
    visible = unescape(re.sub(r"<[^>]+>", "", page))
    assert visible.count(text) == 3  # once for each branch, letter for letter


def test_figures_take_any_script_and_no_formula(bert):
    found = explain_text(*bert, "the $\\frac{ cat 猫 кот \u202e \x00 sleeps" + " the" * 30)
    assert Image.open(io.BytesIO(found.png())).size[0] > 500


def test_a_text_of_100000_characters_is_cut_and_it_is_said(bert, gpt):
    for model, tokenizer in (bert, gpt):
        found = explain_text(model, tokenizer, "the old cat sleeps " * 5300)
        assert found.words.encoded["input_ids"].shape[1] == 64
        assert any(
            re.fullmatch(r"The model reads 64 tokens: \d+ of 100700 characters .*", note) for note in found.notes
        )
        assert len(found.html()) < 10**6
    short = explain_text(*bert, "the old cat ")
    assert not short.words.cut


def test_limits_of_length_are_those_of_the_table_of_positions(bert):
    _, tokenizer = bert
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=34, pad_token_id=0, **size)
    model = equip(RobertaModel(config), 2, HEAD).eval()
    assert token_limit(model, tokenizer) == 33
    assert explain_text(model, tokenizer, "the cat " * 100).words.encoded["input_ids"].shape[1] == 33


def test_errors_are_one_sentence(bert):
    model, tokenizer = bert
    for arguments, options, message in (
        (("the cat",), {"method": "gradcam"}, "unknown method 'gradcam' for texts; accepted: relevance, gradient"),
        (("  ",), {}, "no word in the text"),
        (("the cat",), {"target": "maybe"}, "the target 'maybe' is not a class of the model; accepted: no, yes"),
        (("the cat",), {"truth": "maybe"}, "the label 'maybe' is not a class"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            explain_text(model, tokenizer, *arguments, **options)
    with pytest.raises(ValueError, match="reads texts, and it was given Image"):
        explain_item(model, tokenizer, Image.new("RGB", (8, 8)))


def test_heads_of_one_branch_and_regressions_have_one_column(bert):
    _, tokenizer = bert
    torch.manual_seed(0)
    model = equip(make_bert(tokenizer), 1, {**HEAD, "fusion": "class"}, problem_type="regression").eval()
    found = explain_text(model, tokenizer, "the old cat")
    assert [column.name for column in found.columns] == [CLASS] and found.evidence is None and found.spectrum is None
    assert found.predictions[0][1] == pytest.approx(float(found.contributions.logits[0]))
    assert any("evidence of words" in note for note in found.notes)
    found.figure()


def test_a_model_for_each_column(bert):
    model, tokenizer = bert
    torch.manual_seed(1)
    alone = enlarge(equip(make_bert(tokenizer), labels=["no", "yes"], head={**HEAD, "fusion": "class"}))
    found = explain_text(model, tokenizer, "the old cat sleeps", class_model=(alone, tokenizer))
    own = explain_text(alone, tokenizer, "the old cat sleeps", target=found.target)
    assert [column.name for column in found.columns] == [CLASS, WORDS, BOTH]
    assert found.columns[0].values == pytest.approx(own.columns[0].values)
    assert found.columns[0].predicted == own.columns[0].predicted
    other = equip(make_bert(tokenizer), labels=["bad", "good"], head=HEAD)
    with pytest.raises(ValueError, match="the model for the words has not the same inputs and classes"):
        explain_text(model, tokenizer, "the old cat sleeps", word_model=(other, tokenizer))
