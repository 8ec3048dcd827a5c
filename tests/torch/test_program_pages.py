"""The programs of docs/programs.md: they run as they are printed, killed and resumed, to the same model."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from documentation import example
from program_server import ProgramServer

pytest.importorskip("torch")

PLAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
for inputs, labels in loader:
    loss = (model(inputs) - labels).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final", sum(p.double().sum().item() for p in model.parameters()).hex())
"""
LEVEL_2 = """
import torch
import ortflow.program
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
run = ortflow.program.start(model=model, optimizer=optimizer)
for inputs, labels in run.steps(loader, total=4):
    loss = (model(inputs) - labels).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("final", sum(p.double().sum().item() for p in model.parameters()).hex())
"""


def test_level_2_is_three_lines_and_changes_no_number(tmp_path: Path) -> None:
    difference = difflib.ndiff(PLAIN.splitlines(), LEVEL_2.splitlines())
    assert sum(line.startswith("+ ") for line in difference) == 3
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", text], cwd=tmp_path, env=environment, text=True, capture_output=True, check=True
        ).stdout
        for text in (PLAIN, LEVEL_2)
    ]
    assert outputs[0] == outputs[1]


TRANSFORMERS = """
import os, random, signal, sys, torch, transformers, numpy
import ortflow.program
KILL = 0
{example}
transformers.set_seed(1)
config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
model = transformers.GPT2LMHeadModel(config)
tokens = torch.randint(0, 50, (40, 8), generator=torch.Generator().manual_seed(0))
data = [dict(input_ids=row, labels=row) for row in tokens]
class Killer(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 7 and run.attempt == 0 and "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
arguments = transformers.TrainingArguments(
    output_dir="out", max_steps=12, per_device_train_batch_size=8, save_steps=3, save_strategy="steps", logging_steps=1,
    report_to=[], use_cpu=True, disable_tqdm=True)
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Stops(), Killer()])
trainer.train(resume_from_checkpoint=checkpoint)
if run.stop_reason:
    sys.exit()
print("final", sum(p.double().sum().item() for p in model.parameters()).hex())
"""

ACCELERATE = """
import os, signal, sys, torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
import ortflow.program
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
total = 24
def train(batch):
    loss = (model(batch[0]) - batch[1]).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    if run.position + 1 == 14 and run.attempt == 0 and "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
{example}
print("final", sum(p.double().sum().item() for p in model.parameters()).hex())
"""

LIGHTNING = """
import logging, os, signal, sys, warnings
warnings.simplefilter("ignore")
import lightning, torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
import ortflow.program
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = ortflow.program.Sampler(data, batch=8, seed=1)
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
{example}
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        if self.trainer.global_step == 14 and ortflow.program.context().attempt == 0 and "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.layer(batch[0]) - batch[1]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
run = ortflow.program.context()
model = Model()
trainer = lightning.Trainer(
    max_steps=24, accelerator="cpu", logger=False, enable_checkpointing=False, use_distributed_sampler=False,
    enable_progress_bar=False, enable_model_summary=False, plugins=[TorchElasticEnvironment()], callbacks=[Ortflow()])
trainer.fit(model, loader, ckpt_path=run.latest() and run.latest() / "lightning.ckpt", weights_only=False)
print("final", sum(p.double().sum().item() for p in model.parameters()).hex())
"""


@pytest.mark.parametrize(
    ("package", "heading", "text"),
    [
        ("transformers", "transformers.Trainer", TRANSFORMERS),
        ("accelerate", "Accelerate", ACCELERATE),
        ("lightning", "Lightning", LIGHTNING),
    ],
)
def test_a_trainer_of_others_is_killed_and_resumes(tmp_path: Path, package: str, heading: str, text: str) -> None:
    for name in {package, "accelerate"} if package == "transformers" else {package}:
        pytest.importorskip(name)
    script = tmp_path / "train.py"
    printed = example(heading)
    assert len([line for line in printed.splitlines() if line.strip()]) <= 24
    script.write_text(text.replace("{example}", printed))

    def run(folder: str, *arguments: str, attempt: int = 0) -> str:
        with ProgramServer(tmp_path / folder, attempt=attempt) as server:
            (process,) = server.start(script, *arguments)
            output: str = process.communicate(timeout=240)[0]
            return output

    def final(output: str) -> str:
        assert "final" in output, output[-3000:]
        return output[output.index("final") :].split()[1]

    calm = final(run("calm"))
    assert "final" not in run("killed", "kill")
    assert list((tmp_path / "killed").glob("step-*"))
    assert final(run("killed", attempt=1)) == calm
    with ProgramServer(tmp_path / "stopped") as server:
        (process,) = server.start(script)
        server.wait(lambda s: s.ranks and s.steps(), 120)
        server.ask("preemption")
        output = process.communicate(timeout=120)[0]
        if "final" not in output:  # it may have reached its end before the request
            assert server.newest() is not None
    assert final(run("stopped", attempt=1)) == calm
