"""Time the op on every backend at hand over the number of queries, and draw it: `benchmark_plot.py --out op.png`."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window

import torch
from matplotlib import pyplot as plt
from torch.utils.benchmark import Timer

from rtdetr.ops import ms_deform_attn, why_not_compiled

SHAPES = ((80, 80), (40, 40), (20, 20))  # an image of 640 x 640


def milliseconds(backend: str, device: str, queries: int, seconds: float, backward: bool) -> float:
    value = torch.randn(1, 8400, 8, 32, device=device, requires_grad=backward)
    locations = torch.rand(1, queries, 8, 3, 4, 2, device=device, requires_grad=backward)
    weights = torch.rand(1, queries, 8, 3, 4, device=device, requires_grad=backward)

    def step() -> None:
        output = ms_deform_attn(value, SHAPES, None, locations, weights, backend=backend)  # type: ignore[arg-type]
        if backward:
            torch.autograd.grad(output.sum(), (value, locations, weights))

    step()
    return Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=seconds).median * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each point of the plot")
    parser.add_argument("--out", type=Path, default=Path("op.png"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reason = why_not_compiled(torch.empty(0, device=device))
    if reason:
        print(reason)
    for backend in ("torch",) if reason else ("torch", device):
        for backward, line in ((False, "-"), (True, "--")):
            name = f"{backend}, forward{' and backward' if backward else ''}"
            times = [milliseconds(backend, device, queries, args.seconds, backward) for queries in args.queries]
            print(
                f"{name:28}", *(f"{queries} queries {ms:.3g} ms" for queries, ms in zip(args.queries, times)), sep="  "
            )
            plt.loglog(args.queries, times, line, marker="o", label=name)
    plt.xlabel("queries")
    plt.ylabel("milliseconds")
    plt.title(f"8 heads, 32 channels, 3 levels, 4 points, float32, {device}")
    plt.legend()
    plt.savefig(args.out, dpi=120)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
