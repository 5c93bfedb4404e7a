"""The documentation as a site: built without a warning, which checks every link within it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rtdetr.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("material", reason="building the site needs mkdocs-material, which the extra dev installs")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(source / "mkdocs.yml"), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    result = build(ROOT, tmp_path)
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stderr
    pages = {each.stem for each in (ROOT / "docs").glob("*.md")}
    assert pages <= {each.stem for each in tmp_path.glob("*.html")}
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "not run" not in front and "copytree" not in front  # what only tests read
    assert (tmp_path / "source/examples/quickstart.ipynb.txt").read_bytes() == (
        ROOT / "examples/quickstart.ipynb"
    ).read_bytes()
    assert "https://fonts." not in front  # nothing is loaded from elsewhere
    commands = (tmp_path / "cli.html").read_text(encoding="utf-8")
    assert all(f"usage: rtdetr {name} " in commands for name in COMMANDS)
    assert all(
        f"usage: rtdetr benchmark {name} " in commands for name in ("op", "assignment", "data", "infer", "train")
    )
    listed, text = ((tmp_path / name).read_text(encoding="utf-8") for name in ("llms.txt", "llms-full.txt"))
    assert "](finetuning.html)" in listed and "measurements" not in listed
    assert "# Command line" in text and "# Training\n" in text and "copytree" not in text


def test_commands_of_a_command_have_their_help_on_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    pages = importlib.import_module("docs_pages")
    helps = {"": "usage: a\n\npositional arguments:\n  {b,c}\n    b  this", "b": "usage: a b", "c": "usage: a c"}

    def run(arguments: Sequence[str]) -> int:
        print(helps["".join(arguments).removesuffix("--help")])
        sys.exit(0)

    assert pages.help_of(run).split("\n\n\n") == [*helps.values()]


def test_broken_links_end_the_build(tmp_path: Path) -> None:
    links = ("data.md#no-such-heading", "no-such-page.md", "../rtdetr/no_such_file.py")
    for name in ("mkdocs.yml", "tools/docs_sources.py", "tools/docs_pages.py", "docs/data.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    config = (tmp_path / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(config[: config.index("nav:\n")], encoding="utf-8")
    text = "".join(f"[broken]({link})\n" for link in links)
    (tmp_path / "docs/index.md").write_text(text, encoding="utf-8")
    result = build(tmp_path, tmp_path / "site")
    missing = [link.split("#")[-1].removeprefix("../") for link in links]
    assert result.returncode == 1 and all(each in result.stderr for each in missing), result.stderr
