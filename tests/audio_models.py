"""Tiny random audio models of every family, with their feature extractors."""

from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTModel,
    AutoModel,
    Data2VecAudioConfig,
    HubertConfig,
    SEWConfig,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    WavLMConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

RATE = 16000
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (20, 10), "conv_kernel": (40, 15)}  # 200 samples a word
POSITIONS = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
STILL = {"mask_time_prob": 0.0, "layerdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0}
WAVES = {**SIZE, **CONVOLUTIONS, **POSITIONS, **STILL}
LAYER = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}


def waveform_config(family):
    return {
        "wav2vec2": lambda: Wav2Vec2Config(**WAVES),
        "wav2vec2-layer": lambda: Wav2Vec2Config(**WAVES, **LAYER),
        "hubert": lambda: HubertConfig(**WAVES),
        "wavlm": lambda: WavLMConfig(**WAVES),
        "wavlm-layer": lambda: WavLMConfig(**WAVES, **LAYER),
        "sew": lambda: SEWConfig(**WAVES, squeeze_factor=2),
        "data2vec": lambda: Data2VecAudioConfig(**{**WAVES, "num_conv_pos_embeddings": 2}, conv_pos_kernel_size=3),
    }[family]()


WAVEFORMS = ("wav2vec2", "wav2vec2-layer", "hubert", "wavlm", "wavlm-layer", "sew", "data2vec")
FAMILIES = ("ast", "whisper", *WAVEFORMS)


def audio_backbone(family):
    """A model and its feature extractor."""
    if family == "ast":
        config = ASTConfig(**SIZE, max_length=64, num_mel_bins=32)
        return ASTModel(config), ASTFeatureExtractor(max_length=64, num_mel_bins=32)
    if family == "whisper":
        size = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
        size |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 32}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        config = WhisperConfig(**size, **tokens, num_mel_bins=8, max_source_positions=100)
        return WhisperEncoder(config), WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    return AutoModel.from_config(waveform_config(family)), Wav2Vec2FeatureExtractor(do_normalize=True)


def audio_folder(family, folder):
    """The same as a folder that `equip` opens."""
    model, extractor = audio_backbone(family)
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)
    return folder
