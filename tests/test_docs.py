"""Every command and every Python block of the documentation runs, or is checked and says why it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from docs_blocks import INLINE, PAGES, READMES, blocks_of, broken_links, commands_of, prose_of
from docs_checks import Wrong, check_mention
from docs_runner import furnish, run_block

from rtdetr.extras import MissingPackage

LANGUAGES = ("", "python", "text", "yaml", "html", "cpp")
ENGLISH = READMES[0]
RUN = [page for page in (ENGLISH, *PAGES) if any(each.language in ("", "python") for each in blocks_of(page))]
SLOW = {"export.md": "an export to ONNX takes half a minute"}


def _as_case(page: Path) -> ParameterSet:
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])


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


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda page: page.name)
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
