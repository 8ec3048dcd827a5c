"""Audio files as a set: the numbers of their samples, classes by folder, and files that are refused or left out."""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import feed
from messages import mentions
from typer.testing import CliRunner

from ortflow.cli.data import app
from ortflow.workflow.data.augmented import like_training
from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.pooled import pooled
from ortflow.workflow.data.samples import reading_of
from ortflow.workflow.data.sources import open_evaluation, open_samples, open_training
from ortflow.workflow.data.sources.audio import Audio
from ortflow.workflow.data.sources.sound_files import decode
from ortflow.workflow.data.workers import Workers
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.planning.first_run import Array
from ortflow.workflow.planning.guessed_set import guess_for
from ortflow.workflow.spec.data import DataSection, DataSet

RATE = 8000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))


def sound(seed: int, length: int, channels: int = 1) -> np.ndarray:
    """int16 [length, channels]"""
    return np.random.default_rng(seed).integers(-(2**15), 2**15, (length, channels), np.int16)


def written(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(samples.itemsize)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten sounds of two classes, of different lengths."""
    for number in range(10):
        written(tmp_path / f"words/{'no' if number < 5 else 'yes'}/{number}.wav", sound(number, 20 + number))
    return tmp_path / "words"


def opened(path: Path, **keys: Any) -> Audio:
    values = {"path": str(path), "audio": {"rate": RATE, **keys.pop("audio", {})}, **keys}
    samples = open_samples(DataSet.model_validate(values))
    assert isinstance(samples, Audio)
    return samples


def test_sounds_are_lists_with_the_classes_of_their_folders(folder: Path) -> None:
    samples = opened(folder)
    assert samples.classes == ("no", "yes")
    assert samples.read("label", np.arange(10)).tolist() == [0] * 5 + [1] * 5
    assert samples.lengths("audio").tolist() == list(range(20, 30))
    for number, values in enumerate(samples.read_ragged("audio", np.arange(10))):
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, sound(number, 20 + number)[:, 0] / np.float32(32768))
    # Batches pad to their longest sample, by any number of workers.
    workers = Workers(1)
    section = DataSection.model_validate({"train": {"path": str(folder), "audio": {"rate": RATE}}, "micro_batch": 5})
    feeds = [feed("x", "audio", "float32"), feed("y", "label")]
    try:
        batches = [
            next(iter(Batches(
                each, SampleOrder(10, 1), feeds, micro_batch=5, accumulation=1, rank=0, world_size=1, last_batch="drop",
            ).read_from(Position()))).micro_batches[0].arrays["x"]
            for each in (samples, pooled(samples, section, 0, "data.train", workers))
        ]  # fmt: skip
    finally:
        workers.close()
    np.testing.assert_array_equal(*batches)
    assert batches[0].shape[0] == 5
    assert 24 <= batches[0].shape[1] <= 29


def riff(code: int, bits: int, channels: int, data: bytes, extensible: bool = False) -> bytes:
    """A WAV file with a chunk of odd length before the sound."""
    step = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else code, channels, RATE, RATE * step, step, bits)
    if extensible:
        form += struct.pack("<HHIH14x", 22, bits, 0, code)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize("extensible", [False, True])
def test_samples_of_each_type(extensible: bool) -> None:
    values = np.array([[-1.0, 0.5], [0.25, -0.125], [0.0, 0.9921875]], np.float32)
    for bits in (16, 24, 32):
        whole = (values.astype(np.float64) * 2 ** (bits - 1)).astype("<i4")
        data = b"".join(number.tobytes()[: bits // 8] for number in whole.reshape(-1))
        _, samples = decode(riff(1, bits, 2, data, extensible), "a.wav")
        np.testing.assert_array_equal(samples, values.T)
    _, samples = decode(riff(1, 8, 2, (values * 128 + 128).astype(np.uint8).tobytes(), extensible), "a.wav")
    np.testing.assert_array_equal(samples, values.T)
    for kind in ("<f4", "<f8"):
        header, samples = decode(riff(3, int(kind[2]) * 8, 2, values.astype(kind).tobytes(), extensible), "a.wav")
        np.testing.assert_array_equal(samples, values.T)
        assert (header.rate, header.channels, header.length) == (RATE, 2, 3)


def test_flac_and_ogg_by_soundfile(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    values = sound(0, 4000, 2)
    for end in ("flac", "ogg", "wav"):
        soundfile.write(tmp_path / f"{end}.{end}", values, RATE)
    flac, plain = opened(tmp_path / "flac.flac"), opened(tmp_path / "wav.wav")
    np.testing.assert_array_equal(flac.read("audio", np.arange(1)), plain.read("audio", np.arange(1)))
    assert flac.columns["audio"].shape == (2, 4000)
    assert opened(tmp_path / "ogg.ogg", audio={"mono": True}).lengths("audio").tolist() == [4000]
    mono = opened(tmp_path / "wav.wav", audio={"mono": True}).read_ragged("audio", np.arange(1))[0]
    np.testing.assert_array_equal(mono, (values.astype(np.float64).mean(axis=1) / 32768).astype(np.float32))
    (tmp_path / "flac.flac").write_bytes((tmp_path / "flac.flac").read_bytes()[:5000])
    with pytest.raises(UserError, match=r"flac.flac: (cannot be decoded|has \d channels)"):
        flac.read("audio", np.arange(1))


def test_what_does_not_fit_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"the first has 8000 samples a second; add audio: \{rate: 8000\}"):
        open_samples(DataSet(path=str(folder)))
    with pytest.raises(UserError, match=r"no/0.wav: has 8000 samples a second, not 16000; .* -ar 16000"):
        opened(folder, audio={"rate": 16000})
    written(folder / "yes/9.wav", sound(9, 29, 2))
    with pytest.raises(UserError, match=r"no/1.wav: has 1 channels of 21 samples, and the first file 1 .* audio.mono"):
        opened(folder)
    assert len(opened(folder, audio={"mono": True})) == 10
    for content, message in (
        (b"ID3", "its header is damaged"),
        (b"RIFF\0\0\0\0AVI ....", "it is not a WAV file"),
        (riff(2, 4, 1, b"1234"), "4 bits in the WAV format 2"),
        (riff(1, 16, 1, b""), "has no samples"),
        (riff(1, 16, 1, bytes(100))[:-10], "is truncated: it has 90 of 100 bytes"),
    ):
        (folder / "yes/9.wav").write_bytes(content)
        with pytest.raises(UserError) as refused:
            opened(folder)
        assert mentions(str(refused.value), f"{folder}/yes/9.wav: … {message}")
    # Headers are kept by names and sizes: what has changed behind them is noticed when it is read.
    written(folder / "yes/9.wav", sound(9, 29))
    samples = opened(folder)
    (folder / "yes/9.wav").write_bytes(riff(3, 32, 1, np.full(17, np.nan, np.float32).tobytes()))
    with pytest.raises(UserError, match=r"yes/9.wav: holds NaN"):
        samples.read_ragged("audio", np.array([9]))


def test_a_file_that_has_changed_is_not_stretched(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", sound(0, 10, 2))
    samples = opened(path)
    assert samples.read("audio", np.arange(1)).shape == (1, 2, 10)
    written(path, sound(0, 10, 1))
    with pytest.raises(UserError, match=r"a.wav: has 1 channels of 10 samples, and its header had other numbers"):
        samples.read("audio", np.arange(1))


def test_damaged_files_up_to_a_share_are_left_out(folder: Path) -> None:
    (folder / "no/3.wav").write_bytes(b"RIFF")
    written(folder / "yes/7.wav", sound(7, 27), rate=44100)
    with pytest.raises(Faults, match="2 of 10 files are bad"):
        opened(folder, bad_rows=0.1)
    samples = opened(folder, bad_rows=0.2)
    assert samples.lengths("audio").tolist() == [20, 21, 22, 24, 25, 26, 28, 29]
    assert [len(each) for each in samples.read_ragged("audio", np.arange(8))] == samples.lengths("audio").tolist()
    reading = reading_of(samples)
    assert (reading.skipped, len(reading.bad_rows)) == (2, 2)
    assert mentions(reading.bad_rows[1], f"{folder}/yes/7.wav: has 44100 samples a second, not {RATE}")
    assert digest_of(opened(folder, bad_rows=0.3)) == digest_of(samples)
    listed = CliRunner().invoke(app, ["verify", str(folder)])
    assert listed.exit_code != 0
    assert isinstance(listed.exception, Faults)
    assert mentions(str(listed.exception), "no/3.wav", "yes/7.wav", "2 of 10 files are bad")


def test_a_run_file_is_guessed(folder: Path) -> None:
    samples, made = guess_for(folder, [Array("wave", "float32", (None,))], [Array("logits", "float32", (2,))])
    assert len(samples) == 10
    assert made.preparation == {"audio": {"rate": RATE, "mono": True}}
    assert (made.columns, made.loss["label"]) == ({"wave": "audio"}, "label")


def test_evaluation_sets_have_the_training_set_s_classes(folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "later/yes/a.wav", sound(0, 5))
    later = like_training(opened(tmp_path / "later"), opened(folder), "data.eval")
    assert later.read("label", np.arange(1)).tolist() == [1]
    written(tmp_path / "later/maybe/a.wav", sound(0, 5))
    with pytest.raises(UserError, match="has the class 'maybe', which the training set does not have"):
        like_training(opened(tmp_path / "later"), opened(folder), "data.eval")
    train = {"path": str(folder), "audio": {"rate": RATE}}
    values = {"train": train, "eval": {"fraction": 0.4, "stratify": "label"}, "micro_batch": 1}
    data = DataSection.model_validate(values)
    training, evaluation = open_training(data, 0), open_evaluation(data, 0)
    assert evaluation is not None
    assert sorted([*training.lengths("audio"), *evaluation.lengths("audio")]) == list(range(20, 30))
    shown = CliRunner().invoke(app, ["show", str(folder)])
    assert mentions(shown.output, "10 samples", "audio: float32, 20 to 29 elements", "classes: no, yes")
