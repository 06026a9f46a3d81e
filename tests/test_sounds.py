"""Reading sounds: formats, rates, channels, and what is wrong with files."""

import logging
from pathlib import Path

import numpy as np
import pytest
import soundfile

from sot.data.sound_sets import TONES, EvaluationSounds, SoundReader, load_sounds, tones
from sot.data.sounds import Waveform, as_sound, read_sound
from sot.data.spec import SOUND_SUFFIXES, files_in
from sot.data.splits import Split
from sot.data.tags import PictureColumns
from sot.errors import SoundError

RATE = 16_000


def tone(rate, seconds=0.5, channels=1, hertz=440.0):
    time = np.arange(round(rate * seconds)) / rate
    samples = 0.5 * np.sin(2 * np.pi * hertz * time)
    return np.stack([samples] * channels, 1)


def loudest(samples):
    """Frequency that a sound has most of."""
    return np.fft.rfftfreq(len(samples), 1 / RATE)[np.abs(np.fft.rfft(samples)).argmax()]


@pytest.mark.parametrize(
    ("name", "rate", "channels", "subtype"),
    [
        ("a.wav", 44_100, 1, "PCM_16"),
        ("a.wav", 16_000, 2, "PCM_U8"),
        ("a.wav", 48_000, 6, "PCM_24"),
        ("a.wav", 22_050, 1, "FLOAT"),
        ("a.wav", 8_000, 1, "DOUBLE"),
        ("a.wav", 192_000, 1, "PCM_16"),
        ("a.flac", 44_100, 2, "PCM_24"),
        ("a.ogg", 44_100, 1, "VORBIS"),
    ],
)
def test_formats_rates_and_channels(tmp_path, name, rate, channels, subtype):
    soundfile.write(tmp_path / name, tone(rate, channels=channels), rate, subtype)
    samples = read_sound(tmp_path / name, RATE, 10)
    assert samples.dtype == np.float32 and samples.shape == (RATE // 2,)
    assert loudest(samples) == pytest.approx(440, abs=3) and 0.4 < np.abs(samples).max() < 0.65


def test_long_ones_are_cut_short_ones_padded_and_silence_is_read(tmp_path):
    soundfile.write(tmp_path / "long.wav", tone(8000, 3), 8000)
    assert len(read_sound(tmp_path / "long.wav", RATE, 1.5)) == 1.5 * RATE
    soundfile.write(tmp_path / "short.wav", tone(8000, 0.01), 8000)
    short = read_sound(tmp_path / "short.wav", RATE, 1.5)
    assert len(short) == 0.1 * RATE and short[:80].any() and not short[-80:].any()
    soundfile.write(tmp_path / "silent.wav", np.zeros(800), 8000)
    assert not read_sound(tmp_path / "silent.wav", RATE, 1.5).any()


def test_what_cannot_be_read_is_told_in_words(tmp_path):
    (tmp_path / "text.wav").write_text("no sound")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 8000)
    soundfile.write(tmp_path / "wrong.wav", np.full(900, np.nan), 8000, "FLOAT")
    soundfile.write(tmp_path / "huge.wav", np.full(900, 3e38), 8000, "FLOAT")
    whole = tmp_path / "cut.flac"
    soundfile.write(whole, tone(8000, 2), 8000)
    whole.write_bytes(whole.read_bytes()[:30])
    soundfile.write(tmp_path / "other.wav", tone(8000), 8000, format="AIFF")
    for name, reason in {
        "text.wav": "it is no sound that can be read",
        "empty.wav": "it has no samples",
        "wrong.wav": "not finite",
        "huge.wav": "larger than 1e",
        "cut.flac": "no sound|no samples",
        "other.wav": "it is AIFF; accepted: WAV, FLAC, OGG",
    }.items():
        with pytest.raises(SoundError, match=f"cannot read {name}: .*({reason})"):
            read_sound(tmp_path / name, RATE, 1)
    with pytest.raises(FileNotFoundError, match="no such sound"):
        read_sound(tmp_path / "none.wav", RATE, 1)
    with pytest.raises(SoundError, match="floating-point"):
        read_sound(Waveform(np.zeros(9, dtype=int), RATE), RATE, 1)
    with pytest.raises(SoundError, match="it has 10 samples a second"):
        read_sound(Waveform(np.zeros(9), 10), RATE, 1)


def test_samples_in_memory():
    floats = tone(RATE)[:, 0]
    whole = read_sound(as_sound(floats, RATE), RATE, 1)
    for kind, scale in (("int16", 2**15), ("int32", 2**31)):
        samples = (floats * (scale - 1)).astype(kind)
        np.testing.assert_allclose(read_sound(as_sound((samples, RATE), 8000), RATE, 1), whole, atol=1e-4)
    of_datasets = {"array": tone(48_000)[:, 0], "sampling_rate": 48_000, "path": None}
    assert loudest(read_sound(as_sound(of_datasets, RATE), RATE, 1)) == pytest.approx(440, abs=3)
    assert as_sound("a.wav", RATE) == Path("a.wav")
    with pytest.raises(ValueError, match="rate of a sound is a whole number of samples a second, got 'fast'"):
        as_sound((floats, "fast"), RATE)


def test_tones_are_always_the_same_and_of_five_kinds():
    data = load_sounds("tones", Split(stratified=True))
    assert data.labels == list(TONES) and (len(data.train), len(data.val)) == (160, 40)
    first, again = tones(), tones()
    assert all(np.array_equal(a.samples, b.samples) for (a, _), (b, _) in zip(first, again))
    low, high = (loudest(first[kind][0].samples) for kind in (0, 1))
    assert 150 <= low <= 400 and 1000 <= high <= 3000


def sounds(folder, *names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / name, tone(8000, hertz=200 + 10 * number), 8000)


def test_folders_and_tables(tmp_path):
    sounds(tmp_path, *(f"{kind}/{number}.wav" for kind in ("cat", "dog") for number in range(5)))
    found = load_sounds(str(tmp_path), Split(stratified=True))
    assert found.labels == ["cat", "dog"] and (len(found.train), len(found.val)) == (8, 2)
    assert len(files_in(tmp_path, SOUND_SUFFIXES)) == 10
    table = tmp_path / "meta" / "all.csv"
    table.parent.mkdir()
    sounds(tmp_path / "audio", "1.flac", "2.flac", "3.flac", "4.flac")
    table.write_text("filename,category,split\n1.flac,cat,train\n2.flac,dog,train\n3.flac,cat,test\n4.flac,dog,test\n")
    read = load_sounds(str(table), Split(), PictureColumns("category"))
    assert read.labels == ["cat", "dog"] and (len(read.train), len(read.val)) == (2, 2)
    item = EvaluationSounds(read.val, SoundReader(RATE, 1.0))[1]
    assert item["labels"] == 1 and item["samples"].shape == (RATE // 2,)
    with pytest.raises(ValueError, match="unknown data 'nothing'; accepted: tones, a folder"):
        load_sounds("nothing")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="holds no sounds"):
        load_sounds(str(tmp_path / "none"))


def test_one_that_cannot_be_read_is_named_and_does_not_count(tmp_path, caplog):
    sounds(tmp_path, *(f"{kind}/{number}.wav" for kind in ("cat", "dog") for number in range(3)))
    (tmp_path / "dog" / "1.wav").write_bytes(b"RIFF")
    found = load_sounds(str(tmp_path), Split(val_share=1))
    with caplog.at_level(logging.WARNING):
        labels = [item["labels"] for item in EvaluationSounds(found.val, SoundReader(RATE, 1.0))]
    assert sorted(labels) == [-100, 0, 0, 0, 1, 1] and "Sound" in caplog.text and "1.wav" in caplog.text
