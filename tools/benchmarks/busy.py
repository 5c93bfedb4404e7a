"""Steps per second of the demo's training, alone and beside a busy program, with and without rtdetr/openmp_threads.py.

`python tools/benchmarks/busy.py`, on a machine that does nothing else. They take turns, so that drift hits all alike.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a clone works without being installed


def train(yielding: bool) -> None:
    """Trains as many steps as each line of the input says, and prints their rate."""
    import torch

    from rtdetr.config import load_config
    from rtdetr.data.shapes import make_shapes
    from rtdetr.engine.trainer import Trainer
    from rtdetr.openmp_threads import yielding_cpu

    folder = make_shapes(ROOT / "datasets" / "shapes")
    paths = [f"data.{split}.images={folder / split}" for split in ("train", "val")]
    paths += [f"data.{s}.annotations={folder}/annotations/instances_{s}.json" for s in ("train", "val")]
    config = load_config(ROOT / "configs" / "rtdetrv3_nano_shapes.yml", paths)
    trainer = Trainer(config, ROOT / "output" / "busy", torch.device("cpu"))
    batches = trainer.train_loader.stream(0)
    trainer.model.train()
    with yielding_cpu() if yielding else nullcontext():
        trainer.train_step([next(batches)])
        print("ready", flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            for _ in range(int(line)):
                trainer.train_step([next(batches)])
            print(int(line) / (time.perf_counter() - start), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20, help="of each turn (default: 20)")
    parser.add_argument("--train", choices=("plain", "yielding"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.train:
        train(args.train == "yielding")
        return 0
    rates: dict[tuple[str, str], list[float]] = {}
    runs = {}
    for kind in ("plain", "yielding"):
        command = [sys.executable, str(Path(__file__).resolve()), "--train", kind]
        runs[kind] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert runs[kind].stdout.readline() == "ready\n", "the training did not start"
    for number in range(args.rounds):
        for place in ("alone", "busy"):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if place == "busy" else None
            for kind in ("plain", "yielding") if number % 2 else ("yielding", "plain"):
                runs[kind].stdin.write(f"{args.steps}\n")
                runs[kind].stdin.flush()
                rates.setdefault((kind, place), []).append(float(runs[kind].stdout.readline()))
            if other is not None:
                other.kill()
                other.wait()
    for run in runs.values():
        run.communicate()
    for kind, says in (("plain", "OpenMP as it is"), ("yielding", "yielding the CPU")):
        alone, busy = median(rates[kind, "alone"]), median(rates[kind, "busy"])
        print(
            f"{says:16s} alone {alone:.2f} steps/s, beside a busy program {busy:.2f} ({alone / busy:.1f} times slower)"
        )
    cost = median(a / b for a, b in zip(rates["plain", "alone"], rates["yielding", "alone"])) - 1
    print(f"yielding the CPU costs {100 * cost:.1f} % alone (median of {args.rounds} pairs)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
