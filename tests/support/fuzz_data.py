"""Random damage to good sets of every format: the doctor must answer, in time, in bounds, and open nothing outside.

    python tests/support/fuzz_data.py 10000 [seed]

Prints how many sets were found sound, survivable and unusable, the slowest, and the memory; exits 1 at the first
traceback, at one that takes more than LONGEST seconds of the processor or hangs, or when a file outside the set is
opened.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hostile_folders import write_voc, write_yolo
from hostile_sets import SOUND, write_case
from named_sets import WRITERS
from sound_set import write_images

from rtdetr.data.doctor.examine import examine

LONGEST = 20.0  # seconds of the processor: a busy machine is no fault
HANGING = 600.0  # seconds
MOST_MEMORY = 2 * 2**30  # bytes
TOKENS = (
    *("NaN", "Infinity", "-1", "0", "1e308", "1e999", "null", "true", '""', "[]", "{}", '"x"', "9" * 400, "9" * 5000),
    *("[" * 3000, "<a>" * 3000, "{" * 99, "\\ud800", "\\u0000", "../../../etc/passwd", "/etc/passwd", "\0", "\ufeff"),
    *("<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]>", "&x;", "!!python/object/apply:os.system [true]"),
    *("&a [*a, *a]", ": :", "\t", "\r", "'", '"', "]", "}", ",", "</object>", "nan", "inf", "0.5 0.5", "1_0", "0x7f"),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, -1e308, 1e-99, "", "1", "\ud800"),
    *(float("nan"), float("inf"), -float("inf"), [], {}, [[]], [None], {"id": 1}, "../x.png", "/etc/passwd", "a" * 999),
)


def make_sets(root: Path) -> dict[str, Path]:
    """A good set of each format."""
    write_images(root / "made")
    (root / "coco").mkdir()
    write_case(SOUND, root / "coco", root / "made")
    write_voc(root / "voc", root / "made")
    write_yolo(root / "yolo", root / "made")
    for name, write in WRITERS.items():
        write(root / name, root / "made")
    return {name: root / name for name in ("coco", "voc", "yolo", *WRITERS)}


def damage(folder: Path, rng: random.Random) -> str:
    """Changes one to three things in a set, and says what."""
    texts = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".xml", ".txt", ".yaml"))
    said = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        images = sorted(folder.rglob("*.png"))
        path = rng.choice([rng.choice(texts), texts[0], texts[-1], rng.choice(images)]) if images else texts[0]
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        path.unlink()  # it may be a hard link
        way = rng.choice(("bytes", "token", "cut", "swap", "gone", "json", "json", "line"))
        if way == "gone":
            instead = rng.choice(("", "folder", path.name, "/etc"))
            if instead == "folder":
                path.mkdir()
            elif instead:
                path.symlink_to(instead)
        else:
            path.write_bytes(_damaged(content, way, rng))
        said.append(f"{way} of {path.name}")
    return ", ".join(said)


def _damaged(content: bytes, way: str, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    if way == "cut":
        return content[:at]
    if way == "bytes":
        changed = bytearray(content or b"x")
        for _ in range(rng.choice((1, 3, 30))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if way == "swap":
        return content[at:] + content[:at]
    if way == "line":
        lines = content.splitlines(keepends=True) or [b""]
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines) * rng.choice((1, 2, 50)))
        return b"".join(lines)
    if way == "json" and content[:1] in (b"{", b"["):
        try:
            return json.dumps(_changed(json.loads(content), rng)).encode("utf-8", "surrogatepass")
        except ValueError:  # damaged before
            return content
    token = rng.choice(TOKENS).encode("utf-8", "surrogatepass")
    return content[:at] + token + content[at + rng.choice((0, 1, 5)) :]


def _changed(document: Any, rng: random.Random) -> Any:
    """One value somewhere in it replaced, removed, doubled or under another key."""
    place = document
    for _ in range(rng.choice((1, 2, 3, 3, 3, 4))):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = rng.choice(keys)
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.2:
            way = rng.random()
            if way < 0.7:
                place[key] = rng.choice(VALUES)
            elif way < 0.85:
                del place[key]
            elif isinstance(place, list):
                place.append(inner)
            else:
                place[str(key) + "x"] = place.pop(key)
            break
        place = inner
    return document


class Tracer:
    """Sees every file that is opened, and keeps those outside of `inside`. Hooks cannot be taken away again."""

    def __init__(self) -> None:
        self.inside: str = ""
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.inside and isinstance(arguments[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if not path.startswith(self.inside) and not path.endswith((".py", ".pyc", ".so")):
                self.outside.append(path)


def try_one(name: str, good: Path, root: Path, number: int, seed: int, tracer: Tracer) -> tuple[int, float]:
    """The doctor's exit code on a damaged copy, and its seconds of the processor. Raises whatever it raises."""
    folder = root / "damaged"
    shutil.copytree(good, folder, copy_function=os.link)
    said = damage(folder, random.Random(f"{seed} {name} {number}"))
    started = time.process_time()
    tracer.inside = str(root)
    try:
        report = examine(folder / "a.json" if name == "coco" and (folder / "a.json").is_file() else folder)
        for line in report.lines():
            assert "\n" not in line, line
        json.dumps([each.plain() for each in report.defects()])
    except BaseException:
        print(f"seed {seed}, number {number}, {name}: {said}", file=sys.stderr)
        raise
    finally:
        tracer.inside = ""
    seconds = time.process_time() - started
    assert seconds < LONGEST, f"{seconds:.1f} s for seed {seed}, number {number}, {name}: {said}"
    shutil.rmtree(folder)
    return report.code(), seconds


def main() -> int:
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    codes: Counter[tuple[str, int]] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        sets = make_sets(root)
        examine(sets["voc"])  # what is imported late is imported now
        tracer = Tracer()
        for number in range(count):
            name = list(sets)[number % len(sets)]
            faulthandler.dump_traceback_later(HANGING, exit=True)
            code, seconds = try_one(name, sets[name], root, number, seed, tracer)
            codes[name, code] += 1
            slowest = max(slowest, seconds)
            if tracer.outside:
                print(f"opened outside: {tracer.outside[:5]}, number {number}", file=sys.stderr)
                return 1
    faulthandler.cancel_dump_traceback_later()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{count} sets: {dict(sorted(codes.items()))}, slowest {slowest:.2f} s, {memory / 2**20:.0f} MB at most")
    return int(memory > MOST_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
