"""Audio backbones of transformers with the second-order head: spectrograms (AST, Whisper) and waveforms (the rest)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoFeatureExtractor,
    AutoModelForAudioClassification,
    PreTrainedModel,
    WhisperFeatureExtractor,
)
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from sot.models.configuration import SoTConfig, token_width
from sot.models.layout import Layout
from sot.models.modeling import SoTPreTrainedModel
from sot.models.tokens import Tokens

AST, WHISPER = "audio-spectrogram-transformer", "whisper"
PREFIXED = {AST: 2}  # tokens before the words: class and distillation
WITHOUT_NORM = ("sew", "sew-d")  # they end with a projection
MASKED = ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat")  # a mask hides padding from all their layers
AST_HOP = 160  # samples from one row of its spectrogram to the next
USUAL_SECONDS = 10.0  # of a clip of waveforms, which no model limits


class SoTWhisperFeatureExtractor(WhisperFeatureExtractor):
    """Whisper's, with the mask that tells the frames of a clip from the rest of its window, unless that is declined."""

    def __call__(self, *args: Any, return_attention_mask: bool | None = True, **kwargs: Any) -> Any:
        """As Whisper's."""
        return super().__call__(*args, return_attention_mask=return_attention_mask is not False, **kwargs)


def with_mask(processor: Any) -> Any:
    """A feature extractor that says which part of its output is a clip, as pipelines and ours then use it."""
    if type(processor) is WhisperFeatureExtractor:
        settings = {key: value for key, value in processor.to_dict().items() if key != "feature_extractor_type"}
        return SoTWhisperFeatureExtractor(**settings)
    if processor is not None:
        processor.return_attention_mask = True
    return processor


def audio_layout(source: PreTrainedModel) -> Layout:
    """Where an audio model of transformers has its tokens."""
    kind = source.config.model_type
    waves = source.main_input_name == "input_values" and hasattr(source, "_get_feature_vector_attention_mask")
    if kind not in (AST, WHISPER) and not waves:
        accepted = "AST, the encoder of Whisper, and models of waveforms (Wav2Vec2, HuBERT, WavLM, SEW, Data2Vec, …)"
        said = f"{type(source).__name__} does not say which of its tokens are of a clip"
        raise ValueError(f"{said}; accepted: {accepted}")
    prefix = PREFIXED.get(kind, 0)
    width, bare = token_width(source.config), kind in WITHOUT_NORM
    return Layout(width, has_class_token=prefix > 0, num_prefix_tokens=prefix, needs_norm=bare)


def hides_padding(inner: Any) -> bool:
    """Whether a mask hides padding from all layers of a backbone of waveforms."""
    return inner.model_type in MASKED and inner.feat_extract_norm == "layer"


def exported_inputs(config: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an exported model takes: the mask where it is read, of clips of one length elsewhere no mask."""
    inner = config.backbone_config
    masked = inner.model_type == WHISPER or (inner.model_type != AST and hides_padding(inner))
    return {name: value for name, value in inputs.items() if masked or name != "attention_mask"}


def clip_seconds(config: Any, processor: Any) -> float:
    """Seconds of a clip that a model reads: as it was trained, or its window, or ten."""
    kind = config.backbone_config.model_type
    samples = {AST: AST_HOP * getattr(processor, "max_length", 0), WHISPER: getattr(processor, "n_samples", 0)}
    window = samples[kind] / processor.sampling_rate if kind in samples else None
    wanted = config.max_seconds or window or USUAL_SECONDS
    return min(wanted, window or wanted)


def word_count(model: Any, samples: int) -> int | None:
    """Words of a clip of so many samples; None where all clips have as many."""
    kind = model.config.backbone_config.model_type
    if kind == AST:
        return None
    if kind == WHISPER:
        frames = -(-samples // model.processor.hop_length)
        return min(-(-frames // 2), int(model.config.backbone_config.max_source_positions))
    return int(model.backbone._get_feat_extract_output_lengths(samples))


def word_seconds(model: Any, processor: Any, samples: int, moments: int) -> float:
    """How long the sound of a moment is, of a clip of so many samples and moments."""
    inner = model.config.backbone_config
    if inner.model_type == AST:
        return float(AST_HOP * inner.time_stride / processor.sampling_rate)
    if inner.model_type == WHISPER:
        return float(2 * processor.hop_length / processor.sampling_rate)
    return samples / processor.sampling_rate / moments


class SoTForAudioClassification(SoTPreTrainedModel):
    """An audio backbone of transformers with the second-order head."""

    main_input_name = "input_values"
    input_modalities = ("audio",)

    def __init__(self, config: SoTConfig) -> None:
        super().__init__(config)
        self.main_input_name = self.backbone.main_input_name
        inner: Any = config.backbone_config
        of_waveforms = inner.model_type not in (AST, WHISPER)
        self.takes_mask = of_waveforms and hides_padding(inner)
        self.runs_by_length = of_waveforms and not self.takes_mask

    def get_input_embeddings(self) -> nn.Module:
        """A stand-in: sounds are looked up in no table, and peft asks whatever there is for its parameters."""
        return nn.Identity()

    def tokens(
        self,
        input_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_features: Tensor | None = None,
        **kwargs: Any,
    ) -> Tokens:
        """What the head reads of waveforms `(batch, samples)` or spectrograms, as the feature extractor gives them.

        Words are the frames that a clip fills: `attention_mask` says so, of Whisper's window as of padded waveforms.
        """
        if self.config.modality != "audio" or self.layout is None:
            raise ValueError(f"this model reads {self.config.modality}s, not sounds")
        given = input_features if input_values is None else input_values
        if given is None:
            raise ValueError(f"there is no sound: pass {self.main_input_name}")
        outputs = self._encode(given.to(self.backbone.dtype), attention_mask, self.with_extras(kwargs))
        hidden = outputs.last_hidden_state
        prefix = self.layout.num_prefix_tokens
        words = hidden[:, prefix:]
        tokens = Tokens(hidden[:, 0] if prefix else None, words, grid=(self._rows(), words.shape[1] // self._rows()))
        if attention_mask is not None and not prefix:
            tokens.mask = self._word_mask(attention_mask, words.shape[1])
        tokens.outputs = outputs
        return tokens

    def _rows(self) -> int:
        """Bands of frequency of which AST cuts patches; all others have one word for a moment."""
        inner = self.config.backbone_config
        if inner.model_type != AST:
            return 1
        return int((inner.num_mel_bins - inner.patch_size) // inner.frequency_stride + 1)

    def _word_mask(self, mask: Tensor, words: int) -> Tensor:
        if self.config.backbone_config.model_type == WHISPER:
            return mask[:, :: mask.shape[1] // words] != 0  # two frames of the spectrogram are one word
        found: Tensor = self.backbone._get_feature_vector_attention_mask(words, mask)
        return found

    def _encode(self, given: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Any:
        """What the backbone returns, for every clip as if it were alone.

        Of most backbones of waveforms the first layer normalises over time, or later ones look beyond the end of a
        clip, mask or not. These read the clips of each length by themselves. An exporter sees one length only.
        """
        name = self.main_input_name
        if mask is None or not self.runs_by_length or torch.compiler.is_exporting():
            masked = {"attention_mask": mask} if self.takes_mask and mask is not None else {}
            return self.backbone(**{name: given}, **masked, return_dict=True, **kwargs)
        lengths = mask.sum(1)
        parts = {
            length: self.backbone(**{name: given[lengths == length, :length]}, return_dict=True, **kwargs)
            for length in dict.fromkeys(lengths.tolist())
        }
        if len(parts) == 1:
            return next(iter(parts.values()))
        if any(kwargs.get(wanted) for wanted in ("output_hidden_states", "output_attentions")):
            raise ValueError("hidden states of clips of several lengths cannot be stacked: pass one length")
        longest = max(part.last_hidden_state.shape[1] for part in parts.values())
        first = next(iter(parts.values())).last_hidden_state
        hidden = first.new_zeros(len(given), longest, first.shape[2])
        for length, part in parts.items():
            hidden[lengths == length, : part.last_hidden_state.shape[1]] = part.last_hidden_state
        return BaseModelOutput(last_hidden_state=hidden)

    @can_return_tuple
    def forward(
        self,
        input_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        input_features: Tensor | None = None,  # what Whisper's extractor calls them
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits of sounds, as the feature extractor gives them, and the loss if `labels` are given."""
        tokens = self.tokens(input_values, attention_mask, input_features, **kwargs)
        return self.respond(SequenceClassifierOutput, tokens, labels)


AutoModelForAudioClassification.register(SoTConfig, SoTForAudioClassification)
AutoFeatureExtractor.register(SoTConfig, SoTWhisperFeatureExtractor)
