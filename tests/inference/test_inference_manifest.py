"""Lists of images, and results that end in the middle of a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rtdetr.data.classes import DataError
from rtdetr.inference.files import manifest_paths
from rtdetr.inference.results import Done, already_done


def test_a_list_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"a b.jpg\r\n\n \xff.jpg\nlast.png")
    names = [str(each) for each in manifest_paths(tmp_path / "list.txt")]
    assert names == ["a b.jpg", " \udcff.jpg", "last.png"]
    (tmp_path / "list.txt").write_bytes("a ü.jpg\r\nb.jpg\r\n".encode("utf-8-sig"))
    assert [*map(str, manifest_paths(tmp_path / "list.txt"))] == ["a ü.jpg", "b.jpg"]
    (tmp_path / "list.txt").write_bytes("a.jpg\r\n".encode("utf-16"))
    with pytest.raises(DataError, match="is in UTF-16, expected UTF-8"):
        list(manifest_paths(tmp_path / "list.txt"))
    with pytest.raises(DataError, match="is a folder, expected a text file"):
        list(manifest_paths(tmp_path))
    with pytest.raises(DataError, match="cannot be read"):
        list(manifest_paths(tmp_path / "none.txt"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a pipe or device, expected a text file"):
        list(manifest_paths(tmp_path / "pipe"))


def test_only_results_of_the_list_are_counted(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.jpg\nb.jpg\n")
    items = [{"file": "a.jpg", "detections": [{}, {}]}, {"file": "b.jpg", "error": "gone"}, {"file": "c.jpg"}]
    texts = [json.dumps(each) + "\n" for each in items]
    results = tmp_path / "results.jsonl"
    for number, done in enumerate((Done(), Done(1, 0, 2), Done(2, 1, 2))):
        complete = "".join(texts[:number])
        for partial in ("", "{", '{"file": "c', "x" * 40):
            results.write_text(complete + partial)
            assert already_done(results, tmp_path / "list.txt") == done._replace(size=len(complete))
    for text, sentence in (
        (texts[1], "line 1 is that of b.jpg, the manifest has a.jpg"),
        ("".join(texts), "line 3 is that of c.jpg, the manifest has no more images"),
        ("[]\n", "line 1 is no result"),
        ("3\n", "line 1 is no result"),
    ):
        results.write_text(text)
        with pytest.raises(DataError, match=sentence):
            already_done(results, tmp_path / "list.txt")
