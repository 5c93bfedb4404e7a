"""Detects in a folder of shards on a Ray cluster: each actor holds the deployed model, each shard becomes one file.

    pip install "rtdetr[ray]"
    python examples/ray_predict.py -w best.pth shards/ --output-dir found --actors 8 --gpus 1

A shard is a text file, a path of an image per line; all machines must see weights, lists, images and the output
folder under the same paths. found/SHARD.jsonl has a line per image, as `rtdetr predict --manifest` writes them. It
appears when the shard is done, so each image is there once: Ray gives the shard of an actor, worker or machine that
was lost to another one, which begins it anew. Started again, the program goes on with the shards that have no file.
Where a machine does not come back, its actors wait for room elsewhere, and the others do the work.
RAY_ADDRESS names the cluster; without it Ray starts one on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from rtdetr.inference.files import manifest_paths
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.results import item_of


class Detect:
    """Searches the images of a shard."""

    def __init__(self, weights: Path, output: Path, threshold: float, batch_size: int, gpus: float) -> None:
        self.predictor = Predictor(weights, "cuda" if gpus else "cpu", threshold)
        self.output, self.batch_size = output, batch_size

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """How much was found in row["shard"], whose file of results is there then."""
        shard = Path(row["shard"])
        said: Counter[str] = Counter()
        unfinished = self.output / f".{shard.stem}.{os.uname().nodename}.{os.getpid()}"
        with open(unfinished, "w", encoding="utf-8") as file:
            for found in self.predictor.predict_files(manifest_paths(shard), self.batch_size):
                file.write(json.dumps(item_of(found)) + "\n")
                said.update(images=1, unreadable=bool(found.error), objects=len(found.detections))
        os.replace(unfinished, self.output / f"{shard.stem}.jsonl")
        return {"shard": shard.name, **{key: said[key] for key in ("images", "unreadable", "objects")}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, help="folder of *.txt")
    parser.add_argument("-w", "--weights", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--actors", type=int, default=2, help="models in the cluster (default: 2)")
    parser.add_argument("--gpus", type=float, default=0, help="of an actor, e.g. 1 or 0.5 (default: none)")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()

    shards, output = sorted(args.shards.resolve().glob("*.txt")), args.output_dir.resolve()
    if not shards:
        print(f"error: {args.shards}: expected a folder of *.txt, lists of images; got none", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    left = [each for each in shards if not (output / f"{each.stem}.jsonl").exists()]
    print(f"{len(shards) - len(left)} of {len(shards)} shards are done")
    ray.init(log_to_driver=False)
    done = Counter[str]()
    rows = ray.data.from_items([{"shard": str(each)} for each in left], override_num_blocks=max(1, len(left)))
    work = rows.map(
        Detect,
        fn_constructor_args=(args.weights.resolve(), output, args.threshold, args.batch_size, args.gpus),
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_gpus=args.gpus,
        max_restarts=-1,
        max_task_retries=-1,
    )
    for row in work.iter_rows() if left else ():
        done.update({key: value for key, value in row.items() if key != "shard"})
        print(f"{row['shard']}: {row['images']} images, {row['objects']} objects", flush=True)
    for each in (unfinished for shard in shards for unfinished in output.glob(f".{shard.stem}.*")):
        each.unlink()  # of who was lost
    print(f"{done['images']} images, {done['objects']} objects, {done['unreadable']} unreadable; all in {output}")
    return 1 if done["unreadable"] else 0


if __name__ == "__main__":
    sys.exit(main())
