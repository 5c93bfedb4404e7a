"""A file imports only from its own floor or from below, and no imports run in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rtdetr

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {
    "ops": 0,
    "boxes": 0,
    "compile_settings": 0,
    "garbage_collection": 0,
    "gpu_startup": 0,
    "types": 0,
    "process_state": 0,
    "config": 0,
    "config_file": 0,
    "config_keys": 0,
    "extras": 0,
    "foreign_names": 0,
    "outputs": 0,
    "openmp_threads": 0,
    "wording": 0,
    "models": 1,
    "losses": 1,
    "data": 1,
}
FLOORS |= {
    "weights": 2,
    "engine": 3,
    "inference": 3,
    "export": 4,
    "serve": 4,
    "commands": 5,
    "cli": 6,
    "__main__": 7,
    "benchmarks": 7,
}
GROUND = 0
FLOORS["api"] = FLOORS["commands"]  # two ways in, of which neither knows the other
FILES = sorted((ROOT / "rtdetr").rglob("*.py"))


def _room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "rtdetr" and len(parts) > 1 else None


def _imports(path: Path) -> list[str]:
    """Every module that a file imports, at its top or inside a function; `from a import b` also as a.b."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import of {node.module}"
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module == "rtdetr":  # some names of the package come from elsewhere, when they are asked for
                found += [rtdetr._HOMES[alias.name] for alias in node.names if alias.name in rtdetr._HOMES]
    return found


def violations(path: Path) -> list[str]:
    room = path.relative_to(ROOT / "rtdetr").parts[0].removesuffix(".py")
    wrong = []
    for module in _imports(path):
        if module.split(".")[0] in ("tools", "tests"):
            wrong.append(module)
        other = _room(module)
        if other is None or other == room or room == "__init__" or other not in FLOORS:
            continue
        sideways = FLOORS[other] == FLOORS[room] and FLOORS[room] != GROUND
        if FLOORS[other] > FLOORS[room] or sideways:
            wrong.append(module)
    return wrong


def circle(root: Path) -> list[str]:
    """Modules below `root` that import one another in a circle, the first one again at the end; empty when none do.

    A package stands for its own __init__.py only: `from rtdetr.ops import backend` is an import of rtdetr.ops.backend.
    """
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.glob("rtdetr/**/*.py")
    }
    graph = {}
    for module, path in modules.items():
        imported = {name for name in _imports(path) if name in modules} - {module}
        packages = {name for name in imported if any(other.startswith(f"{name}.") for other in imported)}
        graph[module] = imported - packages
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(ROOT / "rtdetr").parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert rooms <= set(FLOORS), f"give {rooms - set(FLOORS)} a floor in {__file__}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    assert violations(path) == []


def test_no_imports_run_in_a_circle() -> None:
    assert circle(ROOT) == []


def test_an_upward_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "rtdetr" / "models" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "from rtdetr.losses.matcher import match_together\n"
        "from rtdetr import RTDETRv3, __version__\n\n"
        "def f():\n    import rtdetr.engine.trainer\n"
    )
    monkeypatch.setattr("test_imports.ROOT", tmp_path)
    matcher = "rtdetr.losses.matcher"
    assert violations(bad) == [matcher, f"{matcher}.match_together", "rtdetr.api", "rtdetr.engine.trainer"]


def test_a_circle_inside_functions_is_found(tmp_path: Path) -> None:
    room = tmp_path / "rtdetr" / "data"
    room.mkdir(parents=True)
    (room / "__init__.py").touch()
    (room / "a.py").write_text("from rtdetr.data import b\n")
    (room / "b.py").write_text("import rtdetr.data.c as c\n")
    (room / "c.py").write_text("")
    assert circle(tmp_path) == []
    (room / "c.py").write_text("def late():\n    from rtdetr.data.a import anything\n")
    assert set(circle(tmp_path)) == {"rtdetr.data.a", "rtdetr.data.b", "rtdetr.data.c"}


def test_a_class_name_has_one_meaning() -> None:
    parsed = (ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in FILES)
    names = Counter(node.name for nodes in parsed for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1] == []


def test_help_imports_nothing_slow() -> None:
    """Each of these takes a tenth of what `rtdetr --help` takes, or more."""
    code = "import sys; from rtdetr.cli import main; main(['--help']); print('imported', *sys.modules)"
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    imported = run.stdout.decode().rpartition("imported ")[2].split()
    assert not {"torch", "numpy", "yaml", "PIL", "statistics", "decimal", "tempfile"} & {*imported}
