"""Fonts that can show a name: Pillow's own, which has Latin letters, or an installed one."""

from __future__ import annotations

import logging
import threading
from functools import cache, lru_cache
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

logger = logging.getLogger(__name__)

TRIED = 16  # pixels; fonts of one fixed size, such as coloured emoji, do not have it and are skipped
UNKNOWN = "\U0010ffff"  # not a character


class RenderedText(NamedTuple):
    """A rendered text; coordinates in pixels from its origin."""

    ink: Image.Image  # mode L: coverage of each pixel by the text
    left: int  # left and top of the ink
    top: int
    right: float  # right and bottom of the text
    bottom: float


def rendered(text: str, name: str, size: float) -> RenderedText:
    """Renders a text in the font for the name. Cached, as FreeType takes longer for one text than all other drawing."""
    return _rendered(text, font_file(name), size)


@lru_cache(maxsize=1024)
def _rendered(text: str, path: Path | None, size: float) -> RenderedText:
    font = _font(path, size, threading.get_ident())
    left, top, right, bottom = ImageDraw.Draw(Image.new("L", (1, 1))).textbbox((0, 0), text, font=font)
    x, y = floor(left), floor(top)
    ink = Image.new("L", (ceil(right) - x, ceil(bottom) - y))
    ImageDraw.Draw(ink).text((-x, -y), text, fill=255, font=font)
    return RenderedText(ink, x, y, right, bottom)


@lru_cache(maxsize=256)
def _font(path: Path | None, size: float, thread: int) -> Any:
    """Loads a font. Cached, as loading takes as long as drawing. thread: owner of the font, as FreeType shares none."""
    return ImageFont.load_default(size=size) if path is None else ImageFont.truetype(path, size)


def font_file(name: str) -> Path | None:
    """Returns the file of the first font that shows every character of the name, else of the one that shows most, with
    one warning per process; None for Pillow's own font."""
    return _file_for(frozenset(name))


@cache
def _file_for(characters: frozenset[str]) -> Path | None:
    best, missing = None, _missing(ImageFont.load_default(size=TRIED), characters)
    for path in _installed() if missing else ():
        try:
            left = _missing(ImageFont.truetype(path, TRIED), characters | set("0123456789. "))
        except OSError:  # not reported, as the user did not choose this font
            continue
        if len(left) < len(missing):
            best, missing = path, left
        if not missing:
            break
    if missing:
        _warn("".join(sorted(missing)))
    return best


def _missing(font: Any, characters: frozenset[str]) -> set[str]:
    """Returns the characters that the font draws like one it does not have."""

    def drawn(character: str) -> tuple[tuple[int, int], bytes]:
        mask = font.getmask(character)
        return mask.size, bytes(mask)

    nothing = drawn(UNKNOWN)
    return {each for each in characters if not each.isspace() and drawn(each) == nothing}


@cache
def _installed() -> list[Path]:
    """Lists the font files of this machine, then those of Matplotlib, upright ones of regular weight first; none that
    draws one placeholder for all characters of a script."""
    from matplotlib import font_manager, get_data_path  # slow

    found = []
    for folders in (None, [get_data_path()]):
        files = [Path(each) for each in font_manager.findSystemFonts(folders)]
        files.sort(key=lambda path: ("Bold" in path.name or "Italic" in path.name, len(path.name), path))
        found += [each for each in files if "LastResort" not in each.name]
    return found


_warned = False


def _warn(characters: str) -> None:
    global _warned
    if not _warned:
        logger.warning(
            "labels: no font here shows %s, drawn as empty boxes; install one that does, such as Noto Sans CJK",
            characters,
        )
    _warned = True
