"""`AutoModel` of a saved folder: the features that its head reads, of whatever the model reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from sot.models.audio import SoTForAudioClassification
from sot.models.configuration import SoTConfig
from sot.models.modeling import EXTRAS, SoTForImageClassification, SoTForSequenceClassification, SoTPreTrainedModel
from sot.models.tokens import Tokens


class SoTModel(SoTPreTrainedModel):
    """A backbone and the pooling of its head, without the last linear layers.

    `last_hidden_state` has the tokens: those of a text as they came, others with the class token first, if there is
    one. `pooler_output` is what the head's linear layers read: the class token, then the pooled words.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The class for what a configuration says that the model reads."""
        config = next((each for each in args if isinstance(each, SoTConfig)), kwargs.get("config"))
        return super().__new__(KINDS[str(config.modality)] if cls is SoTModel and config is not None else cls)

    @can_return_tuple
    def forward(self, inputs: Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPooling:
        """Features of what the model reads: `pixel_values`, `input_ids`, … and what belongs to them."""
        given = {} if inputs is None else {self.main_input_name: inputs}
        tokens = self.tokens(**given, **kwargs)
        read = tokens.to(next(self.classifier.parameters()).dtype)
        pooled = self.classifier(read.class_token, read.word_tokens, read.mask, pre_logits=True)
        extra = (getattr(tokens.outputs, name, None) for name in EXTRAS)
        return BaseModelOutputWithPooling(self._states(tokens), pooled, *extra)

    def _states(self, tokens: Tokens) -> Tensor:
        if self.config.modality == "text":
            return tokens.outputs.last_hidden_state
        if tokens.class_token is None:
            return tokens.word_tokens
        return torch.cat([tokens.class_token.unsqueeze(1), tokens.word_tokens], dim=1)


class SoTImageModel(SoTModel, SoTForImageClassification):
    """Features of images."""


class SoTTextModel(SoTModel, SoTForSequenceClassification):
    """Features of texts."""


class SoTAudioModel(SoTModel, SoTForAudioClassification):
    """Features of sounds."""


KINDS: dict[str, type[SoTModel]] = {"image": SoTImageModel, "text": SoTTextModel, "audio": SoTAudioModel}
AutoModel.register(SoTConfig, SoTModel)
