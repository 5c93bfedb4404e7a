"""Every command and every Python block of the documentation runs, or is checked and says why it does not."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from docs_blocks import INLINE, LINK, PAGES, READMES, ROOT, blocks_of, broken_links, commands_of, prose_of
from docs_checks import Wrong, check_mention
from docs_runner import furnish, run_block

from rtdetr.extras import MissingPackage

LANGUAGES = ("", "python", "text", "yaml", "html", "cpp")
ENGLISH, CHINESE = READMES
RUN = [page for page in (ENGLISH, *PAGES) if any(each.language in ("", "python") for each in blocks_of(page))]
SLOW = {ROOT / "docs/export.md": "an export to ONNX takes half a minute"}


def _as_case(page: Path) -> ParameterSet:
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] if page in SLOW else [])


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "furnished"
    folder.mkdir()
    furnish(folder)
    return folder


@pytest.mark.parametrize("page", [_as_case(page) for page in RUN])
def test_every_block_runs(page: Path, furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    shutil.copytree(furnished, here, symlinks=True)
    monkeypatch.chdir(here)
    names: dict[str, object] = {}
    missing: list[str] = []
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block}: a block in {block.language}; expected one of {LANGUAGES}"
        if block.language in ("", "python"):
            try:
                run_block(block, names)
            except Wrong as error:
                pytest.fail(f"{block}: {error}")
            except MissingPackage as error:
                missing.append(f"the rest of {block}: {error}")
    if missing:
        pytest.skip("; ".join(missing))


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_mentioned_commands_links_and_markers(page: Path) -> None:
    wrong = []
    for text in INLINE.findall(prose_of(page)):
        try:
            check_mention(text)
        except Wrong as error:
            wrong.append(f"`{text}`: {error}")
    for block in blocks_of(page):
        starts = [command.text for command in commands_of(block)] if not block.language else []
        wrong += [
            f"{block}: no line begins with {each}"
            for each in block.skipped
            if not any(s.startswith(each) for s in starts)
        ]
    wrong += [f"a link to {each}" for each in broken_links(page)]
    indented = [line for line in prose_of(page).split("\n\n") if line.startswith("    ")]
    wrong += [f"indented code, which is not run; put ``` around it: {each}" for each in indented]
    assert not wrong, "\n".join([page.name, *wrong])


def named_in(page: Path) -> tuple[list[str], set[str], list[str]]:
    """Commands and Python of the blocks, commands in the text, and links; without what people read alone."""
    blocks = blocks_of(page)
    lines = [command.text for each in blocks if not each.language for command in commands_of(each)]
    python = [ast.dump(ast.parse(each.text)) for each in blocks if each.language == "python"]
    links = {each for each in LINK.findall(prose_of(page)) if each not in (ENGLISH.name, CHINESE.name)}
    return lines + python, set(INLINE.findall(prose_of(page))), sorted(links)


def test_both_readmes_name_the_same_commands() -> None:
    """So what the one says runs, as the other's does."""
    assert named_in(CHINESE) == named_in(ENGLISH)


def test_the_design_page_names_what_is_there() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:rtdetr|tests|docs)/[\w/.]+)(?:`|::(\w+))", text):
        assert (ROOT / name[0]).exists(), name[0]
        assert f"def {name[1]}(" in (ROOT / name[0]).read_text(encoding="utf-8") if name[1] else True, name


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = ["".join(each["source"]) for each in cells if each["cell_type"] == "code"]
    small = codes[0].replace("NUM_TRAIN, NUM_VAL, EPOCHS = 900, 100, 5", "NUM_TRAIN, NUM_VAL, EPOCHS = 12, 4, 1")
    assert small != codes[0] and all(each["outputs"] == [] for each in cells if each["cell_type"] == "code")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, code in enumerate([small, *codes[1:]]):
        exec(compile(code, f"cell {number}", "exec"), names)
