"""Breaks the code in known ways and sees that a named test notices: `make mutants`, or

    python tests/mutants.py [--list] [NAME ...]

Each mutant is a copy of the source in a temporary folder with one expression replaced. It is caught when its test, and
not the test's collection, fails. Exit code 1 if any survives or no longer applies.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "tests/parity/test_parity_train.py::test_training_step_matches_official_model[train_r18_f64_sq_atss]"
COMPONENTS = "tests/parity/test_parity_components.py"
CONVERT = "tests/parity/test_parity_convert.py"
BY_ASSERTION = re.compile(r"tests/\w+/\w+\.py:\d+: (assert |AssertionError|Failed: DID NOT RAISE)")
SECONDS = 900  # for one test; a healthy one takes about 30


class Mutant(NamedTuple):
    name: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    test: str  # must fail


MUTANTS = (
    Mutant(
        "varifocal weight detached",
        "rtdetr/losses/functional.py",
        "ALPHA * p.pow(GAMMA)",
        "ALPHA * p.detach().pow(GAMMA)",
        f"{COMPONENTS}::TestLosses::test_varifocal_and_its_gradient",
    ),
    Mutant(
        "varifocal weight detached, in training",
        "rtdetr/losses/functional.py",
        "ALPHA * p.pow(GAMMA)",
        "ALPHA * p.detach().pow(GAMMA)",
        TRAIN,
    ),
    Mutant(
        "diagonal of the noise masks protected",
        "rtdetr/models/query_groups.py",
        "visible = draws.attention_keep(g, size, NOISE_MASK_RATIO, device)",
        "visible = visible.logical_and(torch.eye(size, dtype=torch.bool, device=device)"
        " | draws.attention_keep(g, size, NOISE_MASK_RATIO, device))",
        TRAIN,
    ),
    Mutant(
        "one-to-many losses divided by the groups",
        "rtdetr/losses/criterion.py",
        "scale = 1 / self._mean_num_boxes(targets, repeats, group)",
        "scale = 1 / self._mean_num_boxes(targets, repeats, group) / num_groups",
        TRAIN,
    ),
    Mutant(
        "biased deviation in ATSS",
        "rtdetr/losses/assigners.py",
        "keepdim=True, correction=1)",
        "keepdim=True, correction=0)",
        f"{COMPONENTS}::test_atss_threshold_is_mean_plus_unbiased_deviation",  # no golden box lies between the two
    ),
    Mutant(
        "normalised by matched instead of all boxes",
        "rtdetr/losses/criterion.py",
        "scale = 1 / self._mean_num_boxes(targets, repeats, group)",
        "scale = 1 / (indices[1][0] >= 0).sum()",
        f"{COMPONENTS}::test_copies_without_a_query_still_count",
    ),
    Mutant(
        "wrong transpose of in_proj",
        "rtdetr/weights/official_names.py",
        "return tensor.t() if is_linear else tensor",
        'return (tensor.reshape(tensor.shape[::-1]) if "in_proj" in official_name else tensor.t())'
        " if is_linear else tensor",
        f"{CONVERT}::TestPaddleFiles::test_transposes_give_paddles_results[tiny.pdparams]",
    ),
    Mutant(
        "no one-to-many group",
        "rtdetr/models/query_groups.py",
        "        if self.cfg.num_one_to_many_queries:\n            last",
        "        if False:\n            last",
        TRAIN,
    ),
    Mutant(
        "no denoising",
        "rtdetr/models/query_groups.py",
        "        if noised is not None:",
        "        if False:",
        TRAIN,
    ),
    Mutant(
        "denoising detached",
        "rtdetr/models/query_groups.py",
        "DenoisingOutputs(noised_logits, noised_boxes, noised",
        "DenoisingOutputs(noised_logits.detach(), noised_boxes.detach(), noised",
        "tests/models/test_models.py::test_denoising_teaches_embedding_decoder_and_encoder",
    ),
    Mutant(
        "no noise masks",
        "rtdetr/models/query_groups.py",
        "visible = draws.attention_keep(g, size, NOISE_MASK_RATIO, device)",
        "pass",
        TRAIN,
    ),
    Mutant(
        "no dense head",
        "rtdetr/models/rtdetrv3.py",
        "dense = self.dense_head(maps) if self.dense_head is not None else None",
        "dense = None",
        TRAIN,
    ),
    Mutant(
        "look forward once",
        "rtdetr/models/decoder.py",
        "inverse_sigmoid(previous)",
        "inverse_sigmoid(previous.detach())",
        TRAIN,
    ),
    Mutant(
        "resize with smoothing",
        "rtdetr/data/resize.py",
        "interpolation=cv2.INTER_CUBIC",
        "interpolation=cv2.INTER_AREA",
        "tests/parity/test_parity_preprocess.py::TestOfficialImages::test_jpeg_within_two_grey_levels",
    ),
    Mutant(
        "any pickle global allowed",
        "rtdetr/weights/pdparams.py",
        "    if allowed is None:\n",
        "    if allowed is None:\n        return getattr(__import__(module), name)\n",
        f"{CONVERT}::TestRefusals::test_foreign_globals_are_named_and_not_run",
    ),
)


def copy_of_the_source(folder: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", "golden", ".pytest_cache")
    for name in ("rtdetr", "tests", "configs", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests" / "golden").symlink_to(ROOT / "tests" / "golden")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if "RTDETR_GOLDEN" in environment:  # a relative path is meant from here
        environment["RTDETR_GOLDEN"] = str(Path(environment["RTDETR_GOLDEN"]).resolve())
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    done = run(folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests)
    return done.returncode, (done.stdout + done.stderr).strip()


def kill(mutant: Mutant) -> str:
    """Empty when the mutant was caught, else what is wrong."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_of_the_source(folder)
        path = folder / mutant.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutant.old) != 1:
            return f"does not apply: {mutant.file} has `{mutant.old}` {source.count(mutant.old)} times, expected once"
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        code, output = run_tests(folder, [mutant.test])
    if code == 0:
        return f"survived: {mutant.test} passes"
    if code != 1 or not BY_ASSERTION.search(output):
        return f"did not fail by its assertions (pytest exit code {code}): {output[-500:]}"
    return ""


def healthy(tests: list[str]) -> str:
    """The tests must pass on the source as it is, and must import the copy and not an installed package."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy_of_the_source(Path(name))
        imported = run(Path(name), "-c", "import rtdetr; print(rtdetr.__path__[0])").stdout.strip()
        if Path(imported).resolve().parent != Path(name).resolve():
            return f"the copy is not what gets imported, but {imported}"
        code, output = run_tests(Path(name), tests)
    return "" if code == 0 else f"the tests fail without any mutation: {output[-500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a mutant's name; default: all")
    parser.add_argument("--list", action="store_true", help="only list them")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.names or any(name in m.name for name in args.names)]
    if not chosen:
        print(f"error: no mutant is called like {', '.join(args.names)}; see --list", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{m.name}: {m.file} -> {m.test}" for m in chosen))
        return 0
    if trouble := healthy(sorted({m.test for m in chosen})):
        print(f"error: {trouble}", file=sys.stderr)
        return 1
    survivors = 0
    for mutant in chosen:
        start = time.monotonic()
        trouble = kill(mutant)
        survivors += bool(trouble)
        print(
            f"{'SURVIVED' if trouble else 'caught'}  {mutant.name} ({time.monotonic() - start:.0f} s)  {trouble}",
            flush=True,
        )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
