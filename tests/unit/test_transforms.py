"""Transforms depend on seed, epoch and the sample's number alone, and do what their names say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import feed, ragged, write_batches
from pictures import write_classes

from ortflow.workflow.data.augmented import augmented, like_training
from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.draws import Draws
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.inputs import BatchInput, LabelSequences, Limits
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.transforms import Transform

EVERYTHING = [
    {"random_crop": {"scale": [0.3, 1.0]}},
    {"random_crop": {"padding": 2}},
    {"flip": "horizontal"},
    {"color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}},
    {"noise": 0.1},
    {"mixup": 0.4},
    {"cutmix": 1.0},
]


def changed(samples: Samples, *transforms: dict[str, Any], seed: int = 3) -> Any:
    return augmented(samples, [Transform.model_validate(one) for one in transforms], seed, "data.train")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    root = write_classes(tmp_path_factory.mktemp("set"), {"cat": 7, "dog": 6})
    return open_samples(DataSet(path=str(root)))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    tokens = ragged([list(range(5, 5 + length)) for length in (40, 60, 90)], "uint16")
    return write_batches(tmp_path_factory.mktemp("text") / "set.arrow", {"tokens": tokens})


def test_ranks_batches_and_a_resume_do_not_change_a_sample(pictures: Samples) -> None:
    """Two epochs with one rank, and with 1 to 3 ranks from the middle on: the same bits for each epoch and sample."""
    samples = changed(pictures, *EVERYTHING)
    feeds = [feed("image", "image", "float32"), feed("label", "label", "float32"), feed("number", "number")]
    numbered = type(samples)(
        samples.dataset, samples.steps, samples.seed, samples.columns, samples.changed, samples.crop
    )
    pictures.numbers["number"] = np.arange(13)  # type: ignore[attr-defined]
    numbered.columns["number"] = pictures.columns["label"]
    seen: dict[tuple[int, int], list[bytes]] = {}
    for world_size, micro_batch, position in ((1, 3, Position()), (2, 2, Position(0, 4)), (3, 1, Position(1, 3))):
        for rank in range(world_size):
            batches = Batches(
                numbered, SampleOrder(13, 11), feeds, micro_batch=micro_batch, accumulation=1,
                rank=rank, world_size=world_size, last_batch="keep",
            )  # fmt: skip
            with batches.read_from(position) as steps:
                for step in steps:
                    if step.epoch == 2:
                        break
                    (batch,) = step.micro_batches
                    for row in range(batch.count):
                        key = (step.epoch, int(batch.arrays["number"][row]))
                        bits = batch.arrays["image"][row].tobytes() + batch.arrays["label"][row].tobytes()
                        seen.setdefault(key, []).append(bits)
    assert len(seen) == 26
    assert all(len(set(values)) == 1 for values in seen.values())
    assert len({values[0] for values in seen.values()}) == 26, "epochs or samples repeat their draws"
    assert max(map(len, seen.values())) == 3
    other = changed(pictures, *EVERYTHING, seed=4).read("image", np.arange(13))
    assert not np.array_equal(other, samples.read("image", np.arange(13)))


def test_each_changes_an_image_as_its_name_says(pictures: Samples) -> None:
    order = np.arange(13)
    plain = pictures.read("image", order)
    flipped = changed(pictures, {"flip": "horizontal"}).read("image", order)
    mirrored = [np.array_equal(image, given[:, :, ::-1]) for image, given in zip(flipped, plain, strict=True)]
    same = [np.array_equal(image, given) for image, given in zip(flipped, plain, strict=True)]
    assert all(one != other for one, other in zip(mirrored, same, strict=True))
    assert 1 < sum(mirrored) < 12
    shifted = changed(pictures, {"random_crop": {"padding": 3}}).read("image", order)
    assert shifted.shape == plain.shape
    assert (shifted == 0).mean() > (plain == 0).mean() + 0.05
    noisy = changed(pictures, {"noise": 0.5}).read("image", order) - plain
    assert abs(noisy.mean()) < 0.05
    assert abs(noisy.std() - 0.5) < 0.03
    bright = changed(pictures, {"color_jitter": {"brightness": 0.5}}).read("image", order)
    assert (bright >= 0).all()
    assert (bright <= 1).all()
    for image, given in zip(bright, plain, strict=True):
        inside = (image < 1) & (given > 0.1)
        assert np.ptp(image[inside] / given[inside]) < 1e-5
    part = changed(pictures, {"random_crop": {"scale": [1.0, 1.0], "ratio": [1.0, 1.0]}}).read("image", order)
    np.testing.assert_array_equal(part, plain)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixed_images_have_mixed_labels(pictures: Samples, kind: str) -> None:
    samples = changed(pictures, {kind: 1.0})
    order = np.arange(13)
    images, labels = samples.read("image", order), samples.read("label", order)
    assert samples.columns["label"].shape == (2,)
    np.testing.assert_allclose(labels.sum(axis=1), 1, rtol=1e-6)
    plain = pictures.read("image", order)
    mixed = 0
    for number, image in enumerate(images):
        share = float(labels[number][int(pictures.read("label", np.array([number]))[0])])
        if kind == "cutmix":
            kept = float((image == plain[number]).all(axis=0).mean())
            partner = next((other for other in plain if ((image == other) | (image == plain[number])).all()), None)
            assert partner is not None
            if share < 1:
                mixed += 1
                assert abs(share - kept) < 1e-5
        elif share < 1:
            mixed += 1
            near = [np.abs(share * plain[number] + (1 - share) * other - image).max() for other in plain]
            assert min(near) < 1e-5
    assert mixed
    held_out = like_training(pictures, samples, "data.eval")
    assert held_out.read("label", np.array([0, 12])).tolist() == [[1, 0], [0, 1]]


def test_masked_tokens_are_labels_and_all_others_are_ignored(sentences: Samples) -> None:
    samples = changed(
        sentences, {"mask_tokens": {"mask_id": 4, "vocabulary": 200, "probability": 0.5, "special": [5, 6]}}
    )
    assert samples.lengths("labels").tolist() == [40, 60, 90]
    tokens, labels = (np.concatenate(samples.read_ragged(name, np.arange(3))) for name in ("tokens", "labels"))
    plain = np.concatenate(sentences.read_ragged("tokens", np.arange(3)))
    chosen = labels != -100
    assert not chosen[np.isin(plain, [5, 6])].any()
    assert 0.4 < chosen.mean() < 0.6
    np.testing.assert_array_equal(labels[chosen], plain[chosen])
    np.testing.assert_array_equal(tokens[~chosen], plain[~chosen])
    assert 0.65 < (tokens[chosen] == 4).mean() < 0.92
    assert tokens.max() < 200
    again = np.concatenate(samples.at(1).read_ragged("tokens", np.arange(3)))
    assert not np.array_equal(tokens, again)
    assert samples.columns["tokens"].maximum == 199
    with pytest.raises(UserError, match=r"the set has a column 'tokens'; give another name in mask_tokens\.labels"):
        changed(sentences, {"mask_tokens": {"mask_id": 4, "vocabulary": 200, "labels": "tokens"}})


def test_padding_is_not_masked(tmp_path: Path) -> None:
    """Packed windows and padded arrays: a model would learn to predict padding."""
    tokens = np.zeros((4, 50), np.int64)
    tokens[:, :20] = 9
    np.savez(tmp_path / "padded.npz", tokens=tokens, attention_mask=(tokens > 0).astype(np.int64))
    plain = open_samples(DataSet(path=str(tmp_path / "padded.npz")))
    samples = changed(plain, {"mask_tokens": {"mask_id": 4, "vocabulary": 10, "probability": 0.9}})
    masked, labels = (samples.read(name, np.arange(4)) for name in ("tokens", "labels"))
    assert not masked[:, 20:].any()
    assert (labels[:, 20:] == -100).all()
    assert (labels[:, :20] == 9).mean() > 0.7


def test_a_function_of_the_user(pictures: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_changes.py").write_text(
        "def darker(image, random):\n    return image * image.dtype.type(random.random())\n"
        "def smaller(image, random):\n    return image[:, 1:]\n"
        "def wrong(image, random):\n    raise KeyError('x')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    dark = changed(pictures, {"function": "own_changes:darker"})
    order = np.array([2, 0])
    once = dark.read("image", order)
    assert not dark.has_ranges
    np.testing.assert_array_equal(once, dark.read("image", order))
    assert (once.mean(axis=(1, 2, 3)) < pictures.read("image", order).mean(axis=(1, 2, 3))).all()
    for name, message in (
        ("own_changes:smaller", r"smaller: returned float32 \[3, 7, 8\] for sample 2, a float32 \[3, 8, 8\]"),
        ("own_changes:wrong", r"wrong: raised KeyError for sample 2"),
    ):
        with pytest.raises(UserError, match=message):
            changed(pictures, {"function": name}).read("image", order)
    with pytest.raises(UserError, match=r"data\.train\.transforms\[0\]\.function: cannot be imported"):
        changed(pictures, {"function": "own_changes:missing"})
    by_file = changed(pictures, {"function": f"{tmp_path / 'own_changes.py'}:darker"})
    np.testing.assert_array_equal(by_file.read("image", order), once)
    with pytest.raises(UserError, match=r"cannot be imported .*; name file\.py:function, relative to the run file"):
        changed(pictures, {"function": f"{tmp_path / 'missing.py'}:darker"})
    sys.modules.pop("own_changes", None)


def test_a_file_of_the_user_may_hold_dataclasses(pictures: Samples, tmp_path: Path) -> None:
    order = np.array([2, 0])
    for folder, factor in (("a", 2), ("b", 3)):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "change.py"
        path.write_text(
            "from __future__ import annotations\nimport dataclasses, sys\n"
            "@dataclasses.dataclass\nclass Change:\n    factor: int\n"
            f"CHANGE = Change({factor})\n"
            "def change(image, random):\n"
            "    return image * image.dtype.type(sys.modules[Change.__module__].CHANGE.factor)\n"
        )
    both = [changed(pictures, {"function": f"{tmp_path / folder / 'change.py'}:change"}) for folder in "ab"]
    for samples, factor in zip(both, (2, 3), strict=True):
        np.testing.assert_array_equal(samples.read("image", order), pictures.read("image", order) * np.float32(factor))
    (tmp_path / "broken.py").write_text("import missing_module\n")
    with pytest.raises(UserError, match="missing_module"):
        changed(pictures, {"function": f"{tmp_path / 'broken.py'}:change"})
    assert not [name for name in sys.modules if name.startswith("ortflow_function_broken")]


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (
            [{"flip": "horizontal", "column": "picture"}],
            r"transforms\[0\]\.flip: there is no column 'picture'; set column",
        ),
        ([{"flip": "vertical", "column": "label"}], r"column 'label' is int64 scalar, not images"),
        ([{"mask_tokens": {"mask_id": 1, "vocabulary": 9}}], r"mask_tokens: there is no column 'tokens'"),
        ([{"noise": 0.1}, {"random_crop": {"scale": [0.1, 1.0]}}], r"transforms\[1\]\.random_crop: scale is for files"),
        ([{"random_crop": {}}], r"random_crop: has neither scale nor padding"),
        ([{"random_crop": {"scale": [0.5]}}], r"scale is \[0\.5\]; give the smallest and the largest"),
    ],
)
def test_what_does_not_fit_is_named(pictures: Samples, transforms: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        changed(pictures, *transforms)


def test_draws_are_the_same_in_every_version() -> None:
    draws = Draws(3, 1, 4)
    assert [draws.below(1000) for _ in range(4)] == FIRST
    one, all_at_once = Draws(5), Draws(5)
    assert [one.word() for _ in range(5)] == all_at_once.words(5).tolist()
    assert one.word() == all_at_once.word()
    normals = Draws(1).normals(20000)
    assert abs(normals.mean()) < 0.03
    assert abs(normals.std() - 1) < 0.02
    shares = np.array([Draws(2, number).beta(0.2) for number in range(2000)])
    assert abs(shares.mean() - 0.5) < 0.03
    assert abs(shares.var() - 1 / (4 * 1.4)) < 0.02


FIRST = [296, 89, 348, 990]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            "[{flip: horizontal, noise: 0.1}]",
            "data.train.transforms[0]: has flip and noise; give each its own item",
        ),
        ("[{noise: 1.0}, {}]", "data.train.transforms[1]: has no kind; give random_crop"),
        ("[{flop: 1}]", "data.train.transforms[0].flop: unknown key; did you mean flip?"),
        (
            "[{mask_tokens: {mask_id: 3}}]",
            "data.train.transforms[0].mask_tokens.vocabulary: is missing, and the set has no text.tokenizer",
        ),
        ("[{mixup: 2.0}]", "data.train.transforms[0].mixup: must be at most 1.0, not 2.0"),
    ],
)
def test_items_that_are_wrong_in_the_run_file(written: str, message: str) -> None:
    text = (
        "name: x\nmodel: {path: m.onnx, loss: {kind: mse}}\ntrain: {steps: 1, optimizer: {name: adamw, lr: 1.0}}\n"
        f"data: {{micro_batch: 2, train: {{path: s, transforms: {written}}}}}\n"
    )
    with pytest.raises(UserError) as error:
        load_run_text(text, "run.yaml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def checked(samples: Any, name: str, dtype: str, shape: tuple[int | None, ...], **limits: Any) -> object:
    label = BatchInput(name, dtype, shape, "label")
    return check_inputs(
        samples, [label], {}, Limits(**limits), micro_batch=1, smaller_batch=False, key_path="data.train"
    )


def shifted(folder: Path, by: float, column: str = "x") -> dict[str, Any]:
    """A function that adds a number."""
    path = folder / f"shift_{str(by).replace('-', 'm').replace('.', '_')}.py"
    path.write_text(f"def shift(values, random):\n    return (values + ({by})).astype(values.dtype)\n")
    return {"function": f"{path}:shift", "column": column}


@pytest.mark.parametrize(
    ("stored", "by", "wanted", "limits"),
    [
        (np.array([1, 2, 3]), -1, "int64", {"bounds": {"x": 3}, "classes": ["x"]}),
        (np.array([-4.0, -2.0], np.float32), 5, "float32", {"counts": ["x"]}),
        (np.array([-1.0, 0.0], np.float32), 1, "float32", {"signs": ["x"], "truths": ["x"]}),
        (np.array([np.nan, np.nan], np.float32), 0, "float32", None),
    ],
    ids=["classes", "counts", "signs", "nothing"],
)  # fmt: skip
def test_what_a_function_makes_is_checked_and_not_what_is_stored(
    stored: np.ndarray, by: float, wanted: str, limits: dict[str, Any] | None, tmp_path: Path
) -> None:
    samples = write_batches(tmp_path / "set.arrow", {"x": stored})
    if limits is None:
        (tmp_path / "fill.py").write_text("import numpy\ndef fill(x, random):\n    return numpy.nan_to_num(x)\n")
        assert checked(changed(samples, {"function": f"{tmp_path}/fill.py:fill", "column": "x"}), "x", wanted, (None,))
        limits = {}
    else:
        assert checked(changed(samples, shifted(tmp_path, by)), "x", wanted, (None,), **limits)
    with pytest.raises(UserError, match="column 'x' holds"):
        checked(samples, "x", wanted, (None,), **limits)
    if by:
        with pytest.raises(UserError, match="column 'x' holds"):
            checked(changed(samples, shifted(tmp_path, by), shifted(tmp_path, -by)), "x", wanted, (None,), **limits)


def test_sequences_of_classes_that_a_function_makes(tmp_path: Path) -> None:
    samples = write_batches(tmp_path / "set.arrow", {"x": ragged([[0, 1], [1, 2, 3]])})
    limits = {"sequences": {"x": LabelSequences(0)}, "bounds": {"x": 5}}
    with pytest.raises(UserError, match="sample 0 of column 'x' holds 0"):
        checked(samples, "x", "int64", (None, None), **limits)
    assert checked(changed(samples, shifted(tmp_path, 1)), "x", "int64", (None, None), **limits)
    with pytest.raises(UserError, match="sample 1 of column 'x' holds 5"):
        checked(changed(samples, shifted(tmp_path, 2)), "x", "int64", (None, None), **limits)


def test_tokens_that_a_function_changes_are_checked_before_and_behind_masks(tmp_path: Path) -> None:
    samples = write_batches(tmp_path / "set.arrow", {"tokens": np.full((300, 4), 7)})
    masks = {"mask_tokens": {"mask_id": 1, "vocabulary": 8, "probability": 0.5, "labels": "labels"}}
    for name in ("tokens", "labels"):
        for steps, top in (([shifted(tmp_path, 5, "tokens"), masks], 13), ([masks], 8)):
            made = changed(samples, *steps)
            assert checked(made, name, "int64", (None, 4), bounds={name: top}, ignore_index=-100)
            with pytest.raises(UserError, match=f"holds {top - 1}"):
                checked(made, name, "int64", (None, 4), bounds={name: top - 1}, ignore_index=-100)
