import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the hub's library is imported

import pytest
import timm
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


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
    }
