"""Pages of the documentation, taken apart: code blocks, commands in running text, and links.

In a page's source, straight before a block,

    <!-- not run: REASON -->                     the block is only checked: options, configs, keys, imports, attributes
    <!-- not run (pip, rtdetr serve): REASON --> so are its lines that begin like this; the others run
    <!-- setup
    value = 1
    -->                                          Python that runs before it and is not shown
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
PAGES = sorted((ROOT / "docs").rglob("*.md"))

FENCE = re.compile(r"```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
NOT_RUN = re.compile(r"not run(?: \(([^)]+)\))?: (.+)", re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:rtdetr|torchrun|make|pip) [^`]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    page: Path
    line: int  # of its first line, from 1
    language: str  # python, text, ...; "" for commands
    text: str
    setup: str = ""  # Python
    reason: str = ""  # why it is not run, or the lines are not that begin as one of `skipped`
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def runs(self, command: str) -> bool:
        return not self.reason or (bool(self.skipped) and not command.startswith(self.skipped))


class Command(NamedTuple):
    line: int  # from 0, within its block
    text: str  # the words, with a space between them
    words: list[str]
    here: str = ""  # what comes on its standard input


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, with what the comments before them say. Raises ValueError for a comment that begins
    like a marker and is none."""
    text, found = page.read_text(encoding="utf-8"), []
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 2
        block = Block(page, line, fence[1], fence[2])
        for comment in _comments_before(text[: fence.start()]):
            marker = NOT_RUN.fullmatch(comment)
            if comment.startswith("setup\n"):
                block = block._replace(setup=comment.removeprefix("setup\n"))
            elif marker:
                skipped = tuple(each.strip() for each in marker[1].split(",")) if marker[1] else ()
                block = block._replace(reason=marker[2], skipped=skipped)
            else:
                raise ValueError(f"{block}: expected `not run: REASON` or `setup` in the comment, got {comment!r}")
        found.append(block)
    return found


def _comments_before(text: str) -> Iterator[str]:
    while text.rstrip().endswith("-->"):
        start = text.rindex("<!--")
        comment = COMMENT.fullmatch(text[start:].strip())
        assert comment is not None
        yield comment[1]
        text = text[:start]


def prose_of(page: Path) -> str:
    """The page without its blocks and comments; lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    return COMMENT.sub(blank, FENCE.sub(blank, page.read_text(encoding="utf-8")))


def commands_of(block: Block) -> Iterator[Command]:
    """What a shell would run, with NAME="..." put in its place."""
    lines, values, i = block.text.split("\n"), {"PWD": "."}, 0
    while i < len(lines):
        start, text, here = i, lines[i], []
        while text.endswith("\\"):
            i += 1
            text = text[:-1] + lines[i]
        i += 1
        if opened := re.search(r"<<'(\w+)'$", text):
            text = text[: opened.start()]
            end = lines.index(opened[1], i)
            here, i = lines[i:end], end + 1
        for name, value in values.items():
            text = text.replace(f"${name}", value)
        if assigned := re.fullmatch(r'(\w+)="(.*)"', text.strip()):
            values[assigned[1]] = assigned[2]
        elif words := shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", text), comments=True):  # without variables of its own
            yield Command(start, " ".join(words), words, "\n".join(here))


def anchors_of(page: Path) -> set[str]:
    """What `#...` may follow a link to the page, as GitHub and mkdocs make them of its headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", each.lower()).strip()) for each in headings}


def broken_links(page: Path) -> list[str]:
    """Links to files and headings that are not there. Addresses of other machines are not tried."""
    broken = []
    for target in LINK.findall(prose_of(page)):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" not in target and (not file.exists() or (anchor and anchor not in anchors_of(file))):
            broken.append(target)
    return broken
