"""A file imports only from its own floor or from below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"ops": 0, "boxes": 0, "types": 0, "config": 0, "models": 1, "losses": 1, "data": 1, "engine": 2, "cli": 3}
GROUND = 0


def _room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "rtdetr" and len(parts) > 1 else None


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import of {node.module}"
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names if node.module == "rtdetr"]
    return found


def violations(path: Path) -> list[str]:
    room = path.relative_to(ROOT / "rtdetr").parts[0].removesuffix(".py")
    wrong = []
    for module in _imports(path):
        if module.split(".")[0] in ("tools", "tests"):
            wrong.append(module)
        other = _room(module)
        if other is None or other == room or room == "__init__":
            continue
        sideways = FLOORS[other] == FLOORS[room] and FLOORS[room] != GROUND
        if FLOORS[other] > FLOORS[room] or sideways:
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("path", sorted((ROOT / "rtdetr").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    assert violations(path) == []


def test_an_upward_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "rtdetr" / "models" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("from rtdetr.losses.matcher import match\nfrom rtdetr.engine import trainer\n")
    monkeypatch.setattr("test_imports.ROOT", tmp_path)
    assert violations(bad) == ["rtdetr.losses.matcher", "rtdetr.engine"]
