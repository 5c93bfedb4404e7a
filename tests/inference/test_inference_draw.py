"""Boxes lie where they are, labels where they can be read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from rtdetr.inference import fonts
from rtdetr.inference.draw import Detection, draw, fitting_text, place_labels, save_crops


def lit(drawn: Image.Image) -> np.ndarray:
    return np.asarray(drawn).astype(int).sum(axis=2) > 0


def test_boxes_are_drawn_where_they_are() -> None:
    black = Image.new("RGB", (800, 400))
    detection = Detection(3, "mug", 0.9, (200.0, 160.0, 600.0, 360.0))
    drawn = lit(draw(black, [detection]))
    assert not np.asarray(black).any() and drawn.shape == (400, 800)
    assert drawn[160, 200:600].all() and drawn[160:360, 200].all() and drawn[360, 200:600].all()
    assert not drawn[180:350, 210:590].any() and not drawn[:, :195].any() and not drawn[365:].any()
    two = draw(black, [detection, detection._replace(category_id=4, box=(0.0, 0.0, 120.0, 120.0))])
    assert two.getpixel((0, 119)) != two.getpixel((200, 359))


@pytest.mark.parametrize(
    ("size", "zoom"), [((96, 64), 7), ((224, 224), 3), ((1, 1), 640), ((500, 375), 1), ((640, 9), 1)]
)
def test_tiny_images_are_enlarged(size: tuple[int, int], zoom: int) -> None:
    width, height = size
    drawn = draw(Image.new("RGB", size), [Detection(1, "a", 0.5, (0.0, 0.0, float(width), float(height)))])
    assert drawn.size == (width * zoom, height * zoom)
    assert lit(drawn)[:, 0].all()


def test_a_box_in_an_enlarged_image_is_where_it_was() -> None:
    drawn = lit(draw(Image.new("RGB", (64, 64)), [Detection(1, "a", 0.5, (16.0, 32.0, 48.0, 60.0))]))
    assert drawn[320, 160:480].all() and drawn[320:600, 160].all() and not drawn[345:595, 165:475].any()


@pytest.mark.parametrize("box", [(-30.0, -30.0, 20.0, 20.0), (620.0, 450.0, 700.0, 500.0), (0.0, 0.0, 640.0, 480.0)])
def test_labels_stay_inside_the_image(box: tuple[float, float, float, float]) -> None:
    (label,) = place_labels([box], [(90.0, 18.0)], (640, 480))
    assert 0 <= label[0] < label[2] < 640 and 0 <= label[1] < label[3] < 480


def test_labels_of_one_place_do_not_hide_each_other() -> None:
    boxes = [(100.0 + shift, 100.0 + shift, 300.0 + shift, 300.0 + shift) for shift in (0.0, 3.0, 6.0, 1.0)]
    labels = place_labels(boxes, [(80.0, 18.0)] * 4, (640, 480))
    assert labels[0] == (100.0, 82.0, 180.0, 100.0)  # the best one has the usual place
    for a, b in itertools.combinations(labels, 2):
        assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) <= max(a[1], b[1]), (a, b)


def test_a_name_too_long_for_the_image_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr("rtdetr.inference.draw.rendered", lambda *of: texts.append(of[0]) or fonts.rendered(*of))
    for repeats, end in ((1, "mug 0.50"), (20, "... 0.50")):
        fitted = fitting_text(Detection(1, "mug" * repeats, 0.5, (0.0, 0.0, 9.0, 9.0)), 14.0, 100)
        assert texts[-1].startswith("mug") and texts[-1].endswith(end) and fitted.right < 100


def font_for(name: str, size: float) -> Any:
    path = fonts.font_file(name)
    return ImageFont.load_default(size=size) if path is None else ImageFont.truetype(path, size)


def test_crops_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    image, found = Image.new("RGB", (40, 30)), Detection(1, "a", 0.9, (30.5, 5.0, 40.0, 9.0))
    save_crops(image, [found, found, found], tmp_path)
    (tmp_path / "notes.jpg").write_text("not a crop")
    save_crops(image, [found], tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"1.jpg", "notes.jpg"}
    assert Image.open(tmp_path / "1.jpg").size == (10, 4)


@pytest.mark.parametrize("name", ["dog", "jAVa", "a\nb", "ямжу"])
@pytest.mark.parametrize("size", [10.0, 14.0, 33.3])
def test_a_text_is_drawn_as_pillow_draws_it(name: str, size: float) -> None:
    """The second time, too, and in another thread, when it is known."""
    text = f"{name} 0.87"
    plain = Image.new("RGB", (300, 100), "orange")
    ImageDraw.Draw(plain).text((20, 10), text, fill="black", font=font_for(name, size))

    def by_us(_: int) -> Image.Image:
        drawn, ours = Image.new("RGB", (300, 100), "orange"), fonts.rendered(text, name, size)
        ImageDraw.Draw(drawn).bitmap((20 + ours.left, 10 + ours.top), ours.ink, fill="black")
        assert (ours.right, ours.bottom) == ImageDraw.Draw(drawn).textbbox((0, 0), text, font_for(name, size))[2:]
        return drawn

    with ThreadPoolExecutor(2) as pool:
        for drawn in (by_us(0), *pool.map(by_us, range(4))):
            np.testing.assert_array_equal(np.asarray(drawn), np.asarray(plain))
    assert fonts.rendered(text, name, size) is fonts.rendered(text, name, size)


def test_no_labels_without_boxes() -> None:
    assert place_labels([], [], (640, 480)) == []


def ink(name: str) -> np.ndarray:
    return np.asarray(draw(Image.new("RGB", (800, 400)), [Detection(1, name, 0.5, (200, 160, 600, 360))]))


def make_font(path: Path, characters: str) -> None:
    """Each character is a bar of a height of its own."""
    builder = FontBuilder(1000, isTTF=True)
    names = [".notdef", *(f"u{ord(each):x}" for each in characters)]
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(each): name for each, name in zip(characters, names[1:])})
    glyphs = {}
    for number, name in enumerate(names):
        pen, top = TTGlyphPen(None), 900 - 40 * number
        pen.moveTo((50, 0))
        for point in ((50, top), (450, top), (450, 0)):
            pen.lineTo(point)
        pen.closePath()
        glyphs[name] = pen.glyph()
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(dict.fromkeys(names, (500, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


@pytest.fixture
def no_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """What a test puts into the list is installed."""
    installed: list[Path] = []
    fonts._file_for.cache_clear()
    monkeypatch.setattr(fonts, "_installed", lambda: installed)
    monkeypatch.setattr(fonts, "_warned", False)
    yield installed
    fonts._file_for.cache_clear()


def test_names_in_other_letters_are_drawn() -> None:
    """Matplotlib's DejaVu has these; empty boxes of four letters are all alike."""
    assert (ink("котя") != ink("ямжу")).any()
    assert (ink("γάτα") != ink("αγγα")).any()


def test_an_installed_font_that_has_the_characters_is_taken(
    no_fonts: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, some, all_of_them = (tmp_path / f"{name}.ttf" for name in ("broken", "some", "all"))
    broken.write_bytes(b"no font")
    make_font(some, "猫0123456789.")
    make_font(all_of_them, "猫犬鳥🐈0123456789.")
    no_fonts += [broken, some, all_of_them]
    assert font_for("cat", 20).getname() == ImageFont.load_default(size=20).getname()
    assert font_for("猫", 20).getname()[0] == "some"
    assert font_for("猫🐈", 20).getname()[0] == "all"
    assert (ink("猫") != ink("犬")).any() and not caplog.records


def test_fonts_of_placeholders_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LastResort.otf", "LastResortHE-Regular.ttf", "NotoSans-Bold.ttf", "NotoSans.ttf", "words.txt")
    for name in names:
        (tmp_path / name).touch()
    search = font_manager.findSystemFonts
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda folders: search(folders or [str(tmp_path)]))
    found = [path.name for path in fonts._installed.__wrapped__()]
    assert found[:2] == ["NotoSans.ttf", "NotoSans-Bold.ttf"] and "DejaVuSans.ttf" in found
    assert not {*names[:2], "words.txt"} & {*found}


def test_characters_that_no_font_has_are_named_once(no_fonts: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    for name in ("犬と猫", "犬と猫", "🐈"):
        ink(name)
    (record,) = caplog.records
    assert record.getMessage().startswith("labels: no font here shows と犬猫, drawn as empty boxes; install")
