"""transformers' ModelTesterMixin and PipelineTesterMixin for a backbone of each kind with our head."""

import os
import sys
import unittest

import timm
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, T5Config, T5EncoderModel, ViTConfig, ViTModel

import sot
from sot.models.modeling import SoTForImageClassification, SoTForSequenceClassification

sys.path[:0] = [os.environ["TRANSFORMERS"], os.path.join(os.environ["TRANSFORMERS"], "utils")]
from tests.test_modeling_common import ModelTesterMixin
from tests.test_pipeline_mixin import PipelineTesterMixin

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 37}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
BACKBONES = {
    "bert": lambda: BertModel(BertConfig(vocab_size=99, **SIZES)),
    "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, pad_token_id=98)),
    "t5": lambda: T5EncoderModel(T5Config(vocab_size=99, **T5_SIZES)),
    "vit": lambda: ViTModel(ViTConfig(image_size=30, patch_size=6, **SIZES)),
    "timm": lambda: timm.create_model("test_vit", img_size=32),
}
IMAGES = {"vit": 30, "timm": 32}


class Tester:
    """What the mixins ask of a model: its configuration and inputs, and their sizes."""

    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = 5, 7, 32, 2, 4
    is_training = True

    def __init__(self, parent, name):
        self.parent, self.name = parent, name
        self.image_size = IMAGES.get(name)
        if self.image_size:
            self.seq_length = 26 if name == "vit" else None

    def get_config(self):
        head = {"heads": 2, "left_dim": 3, "right_dim": 3}
        return sot.equip(BACKBONES[self.name](), 3, head).config

    def prepare_config_and_inputs_for_common(self):
        if self.image_size:
            shape = (self.batch_size, 3, self.image_size, self.image_size)
            return self.get_config(), {"pixel_values": torch.randn(shape)}
        ids = torch.randint(5, 98, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Common(ModelTesterMixin, PipelineTesterMixin):
    """What all have in common."""

    has_attentions = True
    test_resize_embeddings = False
    test_missing_keys = False

    def setUp(self):
        self.model_tester = Tester(self, self.backbone)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class)
        labels = {"labels": torch.zeros(self.model_tester.batch_size, dtype=torch.long)} if return_labels else {}
        return {**inputs, **labels}

    def is_pipeline_test_to_skip(self, *args, **kwargs):
        """Their pipelines want tiny models of the hub; tests/test_transformers_common.py has pipelines of ours."""
        return True


class Texts(Common):
    all_model_classes = (SoTForSequenceClassification,)
    pipeline_model_mapping = {"text-classification": SoTForSequenceClassification}  # noqa: RUF012
    test_resize_embeddings = True


class Pictures(Common):
    all_model_classes = (SoTForImageClassification,)
    pipeline_model_mapping = {"image-classification": SoTForImageClassification}  # noqa: RUF012


class BertTest(Texts, unittest.TestCase):
    backbone = "bert"


class GPT2Test(Texts, unittest.TestCase):
    backbone = "gpt2"


class T5Test(Texts, unittest.TestCase):
    backbone = "t5"


class ViTTest(Pictures, unittest.TestCase):
    backbone = "vit"


class TimmTest(Pictures, unittest.TestCase):
    backbone, has_attentions = "timm", False
