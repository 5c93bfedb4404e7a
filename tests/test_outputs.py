"""A file that is replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtdetr.outputs import atomic_write


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
