"""A file that is replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from rtdetr.outputs import OutputError, atomic_write, check_folder, write_text


@pytest.mark.parametrize("old", ["old", None])
def test_an_error_leaves_what_was_there(old: str | None, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "a.txt"
    if old:
        file.parent.mkdir()
        file.write_text(old)
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as beside:
        beside.write_text("ha")
        raise KeyboardInterrupt
    assert [each.read_text() for each in file.parent.iterdir()] == ([old] if old else [])


def test_the_target_of_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with atomic_write(tmp_path / "link") as beside:
        beside.write_text("new")
        assert (tmp_path / "link").read_text() == "old"
    assert (tmp_path / "link").read_text() == "new" and not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "old" and len([*tmp_path.iterdir()]) == 2


def test_what_a_user_names_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    read, write = os.pipe()
    write_text(Path(f"/dev/fd/{write}"), "new")
    assert os.read(read, 4) == b"new"
    os.close(read), os.close(write)


def test_folders_checked_at_the_same_time_are_in_nobodys_way(tmp_path: Path) -> None:
    refused = []

    def check(name: str) -> None:
        for number in range(200):
            try:
                check_folder(tmp_path / "runs" / str(number) / name)
            except OutputError as error:
                refused.append(error)

    threads = [Thread(target=check, args=(name,)) for name in "abcd"]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not refused and not [*tmp_path.iterdir()]


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, why in (
        ("file", "it is a file"),
        ("file/new", "Not a directory"),
        ("link", "No such file"),
        ("x" * 300, "too long"),
    ):
        with pytest.raises(OutputError, match=f"{name}: nothing can be written there .*{why}"):
            check_folder(tmp_path / name)
    check_folder(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
