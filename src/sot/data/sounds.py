"""One way to read a sound, for training and prediction alike; the only file that knows soundfile and soxr."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sot.errors import SoundError
from sot.extras import need
from sot.files import one_line

Samples = NDArray[np.float32]
FORMATS = ("WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG")  # as libsndfile calls what it finds in a file
RATES = (1_000, 768_000)  # samples a second
MAX_CHANNELS = 64
LOUDEST = 1e10  # of samples, which usually are between -1 and 1; squares of more overflow in a spectrogram
PCM = {"int16": 2.0**15, "int32": 2.0**31}  # what integers are divided by
SHORTEST = 0.1  # seconds; less is padded with silence, of which every backbone makes a word


class Waveform(NamedTuple):
    """A sound in memory: samples `(time,)` or `(time, channels)` and their rate."""

    samples: Any
    rate: int

    def tobytes(self) -> bytes:
        """What tells it from others."""
        return bytes(np.ascontiguousarray(self.samples).data) + str(self.rate).encode()


def as_sound(item: Any, rate: int) -> Path | Waveform:
    """A file, samples with their rate as a pair or as datasets has them, or samples at `rate`."""
    if isinstance(item, str | Path | Waveform):
        return item if isinstance(item, Waveform) else Path(item)
    if isinstance(item, dict) and {"array", "sampling_rate"} <= item.keys():
        item = item["array"], item["sampling_rate"]
    samples, own = item if isinstance(item, tuple) and len(item) == 2 else (item, rate)
    if isinstance(own, bool) or not isinstance(own, int | np.integer):
        raise ValueError(f"the rate of a sound is a whole number of samples a second, got {own!r}")
    return Waveform(np.asarray(samples), int(own))


def read_sound(source: str | Path | Waveform, rate: int, seconds: float) -> Samples:
    """The first `seconds` of a sound, as one channel at `rate`, or ValueError saying what is wrong with it."""
    file = None if isinstance(source, Waveform) else Path(source)
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"no such sound: {file}")
    need("soundfile", "reading sounds", "audio")
    try:
        found = source if isinstance(source, Waveform) else _decoded(str(source), lambda own: math.ceil(seconds * own))
        return _one_channel(found, rate, seconds)
    except Exception as error:  # libsndfile raises its own kinds for damaged files
        raise SoundError("the sound" if file is None else file.name, _reason(error)) from error


def _decoded(file: str, most: Callable[[int], int]) -> Waveform:
    import soundfile

    with soundfile.SoundFile(file) as opened:
        if opened.format not in FORMATS:
            raise ValueError(f"it is {opened.format}; accepted: WAV, FLAC, OGG")
        _check_shape(opened.samplerate, opened.channels)
        return Waveform(opened.read(most(opened.samplerate), dtype="float32", always_2d=True), opened.samplerate)


def _check_shape(rate: int, channels: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise ValueError(f"it has {rate:,} samples a second; accepted: {RATES[0]:,} to {RATES[1]:,}")
    if channels > MAX_CHANNELS:
        raise ValueError(f"it has {channels} channels; at most {MAX_CHANNELS} are accepted")


def _one_channel(found: Waveform, rate: int, seconds: float) -> Samples:
    samples = np.asarray(found.samples)
    if (samples.dtype.kind != "f" and samples.dtype.name not in PCM) or samples.ndim not in (1, 2):
        accepted = "floating-point numbers, int16 or int32, (time,) or (time, channels)"
        raise ValueError(f"samples are {accepted}, got {samples.dtype} of shape {samples.shape}")
    if not len(samples):
        raise ValueError("it has no samples")
    samples = samples.reshape(len(samples), -1)[: math.ceil(seconds * found.rate)]
    _check_shape(found.rate, samples.shape[1])
    if not (np.abs(samples) <= LOUDEST).all():
        raise ValueError(f"some of its samples are not finite numbers, or larger than {LOUDEST:g}")
    samples = samples.astype(np.float32).mean(1) / np.float32(PCM.get(samples.dtype.name, 1.0))
    if found.rate != rate:
        import soxr

        samples = soxr.resample(samples, found.rate, rate)
    short = math.ceil(SHORTEST * rate) - len(samples)
    return np.pad(samples, (0, max(0, short)))[: math.ceil(seconds * rate)].astype(np.float32)


def _reason(error: Exception) -> str:
    if type(error).__module__.startswith("soundfile"):
        return "it is no sound that can be read"
    return one_line(error)
