"""Folders of images: classes and order, decoding, and files that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import encoded, pixels, write_classes
from PIL import Image

from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.data.sources.images import Images
from ortflow.workflow.data.sources.pictures import Preparation
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.media import ImagesSection

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def opened(path: Path, **images: Any) -> Images:
    samples = open_samples(DataSet(path=str(path), images=ImagesSection(**images) if images else None))
    assert isinstance(samples, Images)
    return samples


def decoded(data: bytes, **images: Any) -> np.ndarray:
    preparation = Preparation.of(ImagesSection(**images), data, "a file")
    return preparation.sample(data, "a file")


def test_classes_are_the_sorted_folders(tmp_path: Path) -> None:
    samples = opened(write_classes(tmp_path / "set", {"dog": 2, "cat": 3}))
    assert samples.classes == ("cat", "dog")
    assert samples.read("label", np.arange(5)).tolist() == [0, 0, 0, 1, 1]
    image = samples.read("image", np.array([3, 0]))
    assert image.shape == (2, 3, 8, 8)
    np.testing.assert_array_equal(image[0], pixels(0).transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(image[1], pixels(1000).transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    assert len(list(samples.scan("image"))) == 1


def test_a_flat_folder_with_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(pixels(1)))
    (tmp_path / "b.png").write_bytes(encoded(pixels(2)))
    (tmp_path / "labels.csv").write_text("file,label\nb.png,cat\na.png,dog\n")
    samples = opened(tmp_path)
    assert samples.classes == ("cat", "dog")
    assert samples.read("label", np.arange(2)).tolist() == [1, 0]
    (tmp_path / "labels.csv").write_text("file,label\nb.png,cat\n")
    with pytest.raises(UserError, match=r"labels\.csv: lacks a\.png"):
        opened(tmp_path)
    (tmp_path / "labels.csv").write_bytes(b"file,label\nb.png,caf\xe9\na.png,dog\n")
    with pytest.raises(UserError, match=r"labels\.csv: cannot be read as text in UTF-8"):
        opened(tmp_path)
    (tmp_path / "labels.csv").write_text("\ufefffile,label\nb.png,café\na.png,dog\n", encoding="utf-8")
    assert opened(tmp_path).classes == ("café", "dog"), "as spreadsheets save it"


def test_the_hash_identifies_names_sizes_and_preparation(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "a", {"cat": 2, "dog": 2})
    expected = digest_of(opened(root))
    assert digest_of(opened(write_classes(tmp_path / "b", {"cat": 2, "dog": 2}))) == expected
    assert digest_of(opened(root, crop=4)) != expected
    (root / "dog" / "001.png").write_bytes(encoded(pixels(9, 8, 9)))
    assert digest_of(opened(root)) != expected


def test_a_part_of_a_set_is_a_set(tmp_path: Path) -> None:
    samples = opened(write_classes(tmp_path, {"cat": 3, "dog": 3}))
    part = samples.selected(np.array([4, 1]))
    assert (len(part), part.classes, part.read("label", np.arange(2)).tolist()) == (2, ("cat", "dog"), [1, 0])
    np.testing.assert_array_equal(part.read("image", np.array([0])), samples.read("image", np.array([4])))
    assert part.digest != samples.selected(np.array([1, 4])).digest


def test_an_evaluation_set_uses_the_numbers_of_the_training_set(tmp_path: Path) -> None:
    samples = opened(write_classes(tmp_path / "eval", {"dog": 1, "emu": 1}))
    assert samples.with_classes(("cat", "dog", "emu"), "data.eval.path").read("label", np.arange(2)).tolist() == [1, 2]
    with pytest.raises(
        UserError, match=r"data\.eval\.path: .* has the class 'dog', which the training set does not have"
    ):
        samples.with_classes(("cat", "emu"), "data.eval.path")


@pytest.mark.parametrize(("height", "width"), [(13, 17), (17, 13), (10, 10)])
def test_the_numbers_are_those_of_torchvision(height: int, width: int) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    image = pixels(3, height, width)
    chain = transforms.Compose(
        [
            transforms.Resize(9),
            transforms.CenterCrop(8),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    ours = decoded(encoded(image), resize=9, crop=8, mean=MEAN, std=STD)
    np.testing.assert_array_equal(ours, chain(Image.fromarray(image)).numpy())
    last = decoded(encoded(image), resize=9, crop=8, mean=MEAN, std=STD, layout="hwc")
    np.testing.assert_array_equal(last, ours.transpose(1, 2, 0))


def test_other_pixel_types_become_eight_bits_a_channel() -> None:
    image = Image.fromarray(pixels(4))
    grey = image.convert("L")
    expected = np.asarray(grey).astype(np.float32) / np.float32(255)
    for channel in decoded(encoded(grey)):
        np.testing.assert_array_equal(channel, expected)
    np.testing.assert_array_equal(decoded(encoded(image), channels=1)[0], expected)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    np.testing.assert_array_equal(decoded(encoded(deep))[0], expected)
    palette = image.quantize(16)
    wanted = np.asarray(palette.convert("RGB")).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(decoded(encoded(palette)), wanted)
    clear = image.copy()
    clear.putalpha(100)
    np.testing.assert_array_equal(decoded(encoded(clear)), decoded(encoded(image)))
    inks = encoded(image.convert("CMYK"), "JPEG", quality=100, subsampling=0)
    assert np.abs(decoded(inks) - decoded(encoded(image))).max() < 0.2


def test_an_image_is_upright() -> None:
    image = Image.fromarray(pixels(5, 4, 6))
    turned = Image.Exif()
    turned[0x0112] = 6
    assert decoded(encoded(image, "PNG", exif=turned)).shape == (3, 6, 4)


def test_files_that_are_no_single_image_are_refused_by_name(tmp_path: Path) -> None:
    root = write_classes(tmp_path, {"cat": 2})
    frames = [Image.fromarray(pixels(seed)) for seed in range(3)]
    for name, data, message in (
        ("001.png", encoded(pixels(1))[:-40], r"001\.png: cannot be decoded"),
        ("001.png", b"text", r"001\.png: cannot be decoded"),
        ("001.png", encoded(pixels(1, 8, 9)), r"001\.png: is 9 pixels wide and 8 high, but samples are 8 by 8"),
        ("001.png", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), r"001\.png: holds 3 images"),
        ("001.png", encoded(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"), r"has pixels of type F"),
    ):
        (root / "cat" / name).write_bytes(data)
        with pytest.raises(UserError, match=message):
            opened(root).read("image", np.array([0, 1]))


def test_layouts_that_are_refused(tmp_path: Path) -> None:
    root = write_classes(tmp_path, {"cat": 1})
    for change, message in (
        (lambda: (root / "cat" / "notes.txt").write_text("x"), r"notes\.txt: is not an image"),
        (lambda: (root / "empty").mkdir(), "empty: is a class without images"),
        (lambda: (root / "a.png").write_bytes(b""), r"a\.png: is an image without a class"),
    ):
        change()
        with pytest.raises(UserError, match=message):
            opened(root)
        for stray in (root / "cat" / "notes.txt", root / "a.png"):
            stray.unlink(missing_ok=True)
        if (root / "empty").exists():
            (root / "empty").rmdir()
    with pytest.raises(UserError, match=r"images\.resize: fixes the shorter side alone; set images\.crop"):
        opened(root, resize=8)
    with pytest.raises(UserError, match=r"images\.std: has 1 numbers for 3 channels"):
        opened(root, std=[0.5])
