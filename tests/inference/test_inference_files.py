"""What a list of sources means, and that nothing is left out without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from messages import message

from rtdetr.data.classes import DataError
from rtdetr.inference.files import find_images
from rtdetr.wording import command_running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "b.JPG",
        "a.png",
        "notes.txt",
        "more.txt",
        "noending",
        "sub/c.jpg",
        "sub/deep/a.png",
        "out/a.jpg",
        "x.jpg/y.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_a_folder_and_what_it_leaves_out(folder: Path) -> None:
    listing = find_images([str(folder)])
    assert list(listing.images) == [folder / "a.png", folder / "b.JPG", folder / "x.jpg"]  # the last is a folder
    assert dict(listing.endings) == {".txt": 2, "": 1} and listing.folders == [folder / "out", folder / "sub"]
    text = listing.left_out()
    assert message("passed over", "3 files", ".txt 2", "none 1").search(text) and "\n" not in text
    assert "2 sub-folders" in text and str(folder / "sub") in text and "/**/*.jpg looks into them" in text
    assert find_images([str(folder / "a.png")]).left_out() == ""


def test_recursive_keeps_out_of_the_results(folder: Path) -> None:
    (folder / "sub" / "circle").symlink_to(folder)
    found = find_images([str(folder)], recursive=True, except_in=folder / "out").images
    names = ["a.png", "b.JPG", "sub/c.jpg", "sub/deep/a.png", "x.jpg/y.png"]
    assert [str(each.relative_to(folder)) for each in found] == [str(name) for name in found.values()] == names
    assert folder / "out" / "a.jpg" in find_images([str(folder)], recursive=True).images


def test_a_folder_and_a_link_to_it_are_one(folder: Path) -> None:
    (folder / "another").symlink_to(folder / "sub")
    (folder / "yet another").symlink_to(folder / "sub")
    names = [str(name) for name in find_images([str(folder)], recursive=True, except_in=folder / "out").images.values()]
    assert names == ["a.png", "b.JPG", "sub/c.jpg", "sub/deep/a.png", "x.jpg/y.png"]


def test_files_and_globs(folder: Path) -> None:
    sources = [
        str(folder / "notes.txt"),
        str(folder / "*.png"),
        str(folder / "a.png"),
        str(folder / "sub" / "**" / "*"),
    ]
    found = [str(each.relative_to(folder)) for each in find_images(sources).images]
    assert found == ["notes.txt", "a.png", "sub/c.jpg", "sub/deep/a.png"]


def test_a_source_without_images_is_refused(folder: Path) -> None:
    (folder / "sub" / "c.jpg").unlink()
    with pytest.raises(DataError, match=message("no image there", "sub", "1 sub-folder", "sub/**/*.jpg")):
        find_images([str(folder), str(folder / "sub")])
    with command_running(), pytest.raises(DataError, match=message("no image there", "sub/", "predict --recursive")):
        find_images([str(folder / "sub")])  # `rtdetr export --images` has no --recursive
    with pytest.raises(DataError, match="source: got an empty name"):
        find_images([""])  # not the working directory
    with pytest.raises(DataError, match=r"nowhere.*no image found"):
        find_images(["nowhere"])


def test_a_glob_takes_each_file_once_though_links_go_round(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for file in (tmp_path / "a" / "1.jpg", inner / "2.jpg"):
        file.touch()
    (inner / "up").symlink_to(tmp_path / "a")
    found = [*find_images([f"{tmp_path}/**/*.jpg"]).images]
    assert found == [tmp_path / "a" / "1.jpg", inner / "2.jpg"]
