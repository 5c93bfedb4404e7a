"""What the tests of the commands share: rows of a table, how one is run, and the folder that most run in."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from messages import says
from PIL import Image

from rtdetr import cli
from rtdetr.data.classes import Classes
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint

RENUMBERED = "eval -w model.pth --device cpu -u data.val.annotations=shapes/renumbered.json"


class Row(NamedTuple):
    command: str
    code: int
    says: tuple[str | re.Pattern[str], ...] = ()  # in stdout and stderr together
    writes: tuple[str, ...] = ()  # the only files that may appear or change


def run(command: str) -> int:
    """The exit code of `rtdetr COMMAND`, in this process."""
    try:
        return cli.main(command.split())
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    found = {str(path.relative_to(folder)): "" for path in folder.rglob("*") if path.is_dir()}
    return found | {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()
    }


def check(row: Row, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs a row in its folder. One without `writes` must leave every byte as it is and add nothing."""
    before = contents(folder)
    code = run(row.command)
    out, err = capsys.readouterr()
    text = out + err
    assert code == row.code, text
    for expected in row.says:
        assert says(text, expected)
    assert "Traceback" not in text
    if code == 2 and not row.writes and row.command:
        assert err.startswith("error: ") and len(err.splitlines()) == 1
    after = contents(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {name for name in changed if not (folder / name).is_dir()} == set(row.writes)
    parents = {str(parent) for name in row.writes for parent in Path(name).parents}
    assert {name for name in changed if (folder / name).is_dir()} <= parents


def write_folder(folder: Path) -> None:
    """images/, other/, shapes/ (an annotated set), model.pth, notes.txt, and taken/, where every file that a command
    could want to write is there already; mixed/, deep/ and part/ for what goes wrong with folders."""
    data = tiny_data(folder / "shapes")
    cfg = tiny_config(Path("shapes"))
    torch.manual_seed(0)
    names = ("circle", "square", "triangle", "star", "cross")
    model = build_model(cfg.model, len(names))
    checkpoint = make_checkpoint(cfg, Classes(names, (2, 3, 5, 7, 11)), model.state_dict())
    save_checkpoint(folder / "model.pth", checkpoint)
    image = Image.open(data / "val" / "000000.jpg")
    for name in ("images/a.jpg", "images/b.png", "other/a.jpg", "taken/a.jpg", "mixed/good.jpg", "mixed/good.png"):
        save(image, folder / name)
    for name in ("deep/er/a.png", "deep/fa/a.png", "part/other.jpg", "part/crops/c.png"):
        save(image, folder / name)
    for name in (
        "notes.txt",
        "mixed/notes.txt",
        "taken/results.json",
        "taken/config.yml",
        "taken/results.jsonl",
        "part/coco.json",
    ):
        (folder / name).write_text("of the user\n")
    (folder / "list.txt").write_text("mixed/page.jpg\nimages/a.jpg\n")
    (folder / "part" / "labels").mkdir()
    (folder / "part" / "labels" / "a.txt").write_text("0 .5 .5 1 1\n")
    (folder / "mixed" / "cut.jpg").write_bytes((folder / "mixed" / "good.jpg").read_bytes()[:900])
    (folder / "mixed" / "empty.jpg").touch()
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (folder / "mixed" / "bomb.png").write_bytes(start)
    (folder / "mixed" / "page.jpg").write_text("<html>404</html>")
    (folder / "mixed" / "x.jpg").mkdir()
    shutil.rmtree(data / "train")
    document = json.loads((data / "annotations" / "instances_val.json").read_text())
    renumber(document, {2: 4, 3: 3, 5: 13, 7: 1, 11: 0})
    (data / "renumbered.json").write_text(json.dumps(document))
    document["categories"].append({"id": 8, "name": "dog"})
    (data / "other.json").write_text(json.dumps(document))


def renumber(document: dict[str, Any], ids: dict[int, int]) -> None:
    """Gives the categories of a COCO document those ids, and names that start with a capital."""
    for box in document["annotations"]:
        box["category_id"] = ids[box["category_id"]]
    document["categories"] = [{"id": ids[each["id"]], "name": each["name"].title()} for each in document["categories"]]


def save(image: Image.Image, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)
