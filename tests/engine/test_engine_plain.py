"""kernels=plain: training by PyTorch and SciPy alone, on the way to the same losses."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from engine_helpers import made_up_batch, tiny_config, tiny_updates
from messages import message
from plain_kernels import OurOperators
from run_cases import ROOT, environment

from rtdetr import RTDETRv3
from rtdetr.engine.acceleration.compile import WORTH_IT, why_not_compile
from rtdetr.engine.trainer import Trainer
from rtdetr.ops.compiled import WHY_NOT
from rtdetr.ops.kernels import are_plain, using

CPU = torch.device("cpu")
# Trains, and prints which of our libraries are loaded, which of our operators ran, and how often SciPy matched.
SCRIPT = """
import sys
from pathlib import Path
import scipy.optimize
import torch
from plain_kernels import OurOperators
from rtdetr import cli
solve, solved = scipy.optimize.linear_sum_assignment, []
scipy.optimize.linear_sum_assignment = lambda cost: (solved.append(cost.shape), solve(cost))[1]
with OurOperators() as called:
    code = cli.main(["train", "-c", "rtdetrv3_nano_shapes", "--device", "cpu", *sys.argv[1:]])
print("libraries:", sorted({"_cpu.so", "_cuda.so"} & {Path(each).name for each in torch.ops.loaded_libraries}))
print(*sorted(called.names), "SciPy:", len(solved))
sys.exit(code)
"""


@pytest.mark.parametrize("kernels", ["plain", "auto"])
def test_a_plain_run_calls_no_operator_of_ours(data: Path, tmp_path: Path, kernels: str) -> None:
    """Steps, evaluation and all. With `auto` the same script sees some."""
    updates = [*tiny_updates(data), "train.eval_every=1", "train.epochs=1", "train.max_iterations=2"]
    arguments = ["--output-dir", str(tmp_path / "run"), "-u", *updates, f"kernels={kernels}"]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment() | paths, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    ours, _, solved = done.stdout.splitlines()[-1].rpartition("SciPy: ")
    libraries = done.stdout.splitlines()[-2]
    if kernels == "plain":
        assert not ours.strip() and int(solved) > 0 and libraries == "libraries: []"
    elif WHY_NOT["cpu"] is None:
        assert "rtdetr.ms_deform_attn_backward" in ours and "rtdetr.linear_assignment" in ours and solved == "0"
        assert "_cpu.so" in libraries


def test_losses_of_plain_steps_are_those_of_auto(data: Path, tmp_path: Path) -> None:
    """At a rate that moves nothing: rounding would add up, until another box is matched."""
    ends = []
    for kernels in ("plain", "auto"):
        trainer = Trainer(tiny_config(data, f"kernels={kernels}", "optimizer.lr=1e-12"), tmp_path, CPU)
        trainer.model.train()
        torch.manual_seed(3)
        with OurOperators() as called:
            ends.append([trainer.train_step([made_up_batch((3, 2), seed)]).values for seed in range(20)])
        assert (not called.names) == (kernels == "plain" or WHY_NOT["cpu"] is not None)
        assert not are_plain()
    for plain, auto in zip(*ends, strict=True):
        torch.testing.assert_close(plain, auto, rtol=1e-4, atol=1e-5)


def _values(trainer: Trainer, seed: int) -> torch.Tensor:
    record = trainer.train_step([made_up_batch((3, 2), seed)])
    torch.cuda.synchronize()  # their copy on the host is on its way until then
    return record.values.clone()


@pytest.mark.gpu
def test_plain_steps_on_a_gpu_are_those_of_auto(data: Path, tmp_path: Path) -> None:
    """At a rate that moves nothing, so that rounding does not add up; the later steps of `auto` are graphs."""
    ends, settings = [], ("train.precision=fp32", "train.compile=off", "optimizer.lr=1e-12")
    for kernels in ("plain", "auto"):
        trainer = Trainer(tiny_config(data, f"kernels={kernels}", *settings), tmp_path / kernels, torch.device("cuda"))
        torch.set_float32_matmul_precision("highest")
        trainer.model.train()
        torch.manual_seed(5)
        assert (trainer.graphs is None) == (kernels == "plain")
        with OurOperators() if kernels == "plain" else nullcontext() as called:
            ends.append([_values(trainer, seed) for seed in range(6)])
        assert called is None or not called.names
    for plain, auto in zip(*ends, strict=True):
        torch.testing.assert_close(plain[:-1], auto[:-1], rtol=2e-2, atol=1e-3)


def test_plain_steps_are_not_compiled(data: Path) -> None:
    train = tiny_config(data).train
    assert why_not_compile(train, torch.device("cuda"), 99 * WORTH_IT, kernels="plain") == "kernels=plain"


def test_the_switch_is_put_back_and_takes_two_words() -> None:
    with pytest.raises(ZeroDivisionError), using("plain"):
        assert are_plain()
        1 / 0  # noqa: B018
    assert not are_plain()
    first, second = using("plain"), using("plain")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as of threads
    assert are_plain()
    second.__exit__(None, None, None)
    assert not are_plain()
    with pytest.raises(ValueError, match=message("expected", "kernels", "auto", "plain", "'fast'")), using("fast"):  # type: ignore[arg-type]
        pass


def test_a_model_is_plain_when_it_is_asked_for() -> None:
    model = RTDETRv3.from_pretrained("rtdetrv3_nano_shapes", device="cpu", kernels="plain")
    with OurOperators() as called:
        model.predict(torch.rand(3, 64, 64))
    assert model.cfg.kernels == "plain" and not called.names
    for name, kernels, sentence in (
        ("model.onnx", "plain", "runs as it was exported"),
        ("x.pth", "fast", "got 'fast'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            RTDETRv3.from_pretrained(name, kernels=kernels)  # type: ignore[arg-type]
