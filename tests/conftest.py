import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the hub's library is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is: threads that spin slow other workers down

import pytest
import timm
import torch
from audio_models import audio_folder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from sot.bench.timing import thread_count
from sot.ops import use
from sot.ops.registry import HAS_NUMBA

BACKENDS = [name for name in ("numba", "torch") if name != "numba" or HAS_NUMBA]  # those with kernels or formulae


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    with thread_count(request.param):
        yield request.param


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Every backend that is installed, wherever it can compute what it is given."""
    with use(request.param):
        yield request.param


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    """Small local models in place of the hub names in the pages, which a test cannot download."""
    folder = tmp_path_factory.mktemp("models")
    timm.models.save_for_hf(timm.create_model("test_vit"), folder / "vit", safe_serialization=True)
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "the", "cat", "cats", "sleep", "sleeps"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "bert")
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), pad_token_id=3, **size)).save_pretrained(folder / "bert")
    return {
        "vit_small_patch16_224": str(folder / "vit"),
        "google-bert/bert-base-uncased": str(folder / "bert"),
        "facebook/wav2vec2-base": str(audio_folder("wav2vec2", folder / "wav2vec2")),
        "openai/whisper-tiny": str(audio_folder("whisper", folder / "whisper")),
        "sentence-transformers/all-MiniLM-L6-v2": str(folder / "bert"),
    }
