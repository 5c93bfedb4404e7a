"""Official weights: downloads that go on where they stopped, are verified and converted, and what is said when not."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from messages import message
from weight_server import CONTENT, SHA256, Server

from rtdetr.weights import catalogue
from rtdetr.weights.catalogue import OFFICIAL, Release, located
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.download import OfficialFile, download, fetched, verify


def test_a_download_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "new" / "weights.pdparams"
    server.sent = 1000
    with pytest.raises(CheckpointError, match=message("broken off", "24,600 bytes", "try again")):
        download(server.file(), file)
    assert not file.exists() and file.with_name("weights.pdparams.part").stat().st_size == 1000
    server.sent = 1 << 40
    download(server.file(), file)
    assert server.ranges == [None, "bytes=1000-"] and file.read_bytes() == CONTENT
    assert [each.name for each in file.parent.iterdir()] == ["weights.pdparams"]


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    file, part = tmp_path / "w.pdparams", tmp_path / "w.pdparams.part"
    part.write_bytes(CONTENT[:10])
    server.knows_ranges = False
    download(server.file(), file)
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize("num_bytes", [len(CONTENT), None])
def test_a_part_that_is_whole_is_not_asked_for_again(server: Server, tmp_path: Path, num_bytes: int | None) -> None:
    file = tmp_path / "w.pdparams"
    file.with_name("w.pdparams.part").write_bytes(CONTENT)
    download(server.file(num_bytes), file)
    assert file.read_bytes() == CONTENT and len(server.ranges) == (num_bytes is None)


def test_a_file_of_another_hash_is_refused_and_not_kept(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "w.pdparams"
    with pytest.raises(CheckpointError, match=rf"not the official file: sha256 {SHA256}.*expected 00"):
        download(server.file(sha256="00"), file)
    assert list(tmp_path.iterdir()) == []


def test_a_web_page_and_a_replaced_file_are_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message("other size of file", "25,600 bytes", "7")):
        download(server.file(num_bytes=7), tmp_path / "w.pdparams")
    server.kind = "text/html; charset=utf-8"
    with pytest.raises(CheckpointError, match=message("web page", "w.pdparams")):
        download(server.file(), tmp_path / "w.pdparams")


def fetched_by(official: OfficialFile, file: Path, save: Callable[[], None] | None = None) -> Path:
    checkpoint = file.with_suffix(".pth")
    return fetched(official, file, checkpoint, save or (lambda: checkpoint.write_bytes(b"converted") and None))


def test_an_unknown_hash_is_trusted_once(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    official, file = server.file(None, None), tmp_path / "w.pdparams"
    fetched_by(official, file)
    assert f"trusting this file, sha256 {SHA256}" in caplog.text
    verify(official, file)
    file.write_bytes(b"another")
    with pytest.raises(
        CheckpointError, match=message("other content", SHA256, "download", file.with_suffix(".pdparams.sha256"))
    ):
        verify(official, file)


def test_a_hash_is_noted_only_of_a_file_that_converts(server: Server, tmp_path: Path) -> None:
    official, file = server.file(None, None), tmp_path / "w.pdparams"

    def refuse() -> None:
        raise CheckpointError("damaged")

    file.write_bytes(CONTENT[:10])  # still being copied by hand
    with pytest.raises(CheckpointError, match=message("damaged")):
        fetched_by(official, file, refuse)
    assert file.read_bytes() == CONTENT[:10] and not file.with_suffix(".pdparams.sha256").exists()
    file.unlink()
    with pytest.raises(CheckpointError, match=message("damaged")):
        fetched_by(official, file, refuse)
    assert not file.exists() and not file.with_suffix(".pdparams.sha256").exists()
    assert fetched_by(official, file).read_bytes() == b"converted"
    assert file.with_suffix(".pdparams.sha256").read_text().strip() == SHA256


def test_processes_that_start_together_download_once(server: Server, tmp_path: Path) -> None:
    official, file, saved = server.file(), tmp_path / "w.pdparams", []

    def save() -> None:
        saved.append(file.read_bytes())
        time.sleep(0.1)
        file.with_suffix(".pth").touch()

    with ThreadPoolExecutor(4) as pool:  # each opens the lock anew, as processes do
        list(pool.map(lambda _: fetched_by(official, file, save), range(4)))
    assert server.ranges == [None] and saved == [CONTENT]


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(CheckpointError, match=message("not written", tmp_path / "taken", "RTDETR_WEIGHTS")):
        fetched_by(server.file(), tmp_path / "taken" / "w.pdparams")


def test_without_a_network_it_says_where_the_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTDETR_WEIGHTS", str(tmp_path))
    name = "rtdetrv3_r18vd_6x_coco"
    monkeypatch.setitem(OFFICIAL, name, Release(OfficialFile("http://127.0.0.1:9/file")))
    with pytest.raises(CheckpointError) as raised:
        located(name)
    sentence = str(raised.value)
    assert sentence.startswith("http://127.0.0.1:9/file: cannot be downloaded")
    assert f"bring the file to {tmp_path}/{name}.pdparams" in sentence
    assert f"rtdetr convert {name}.pdparams -o {name}.pth" in sentence and "\n" not in sentence


def test_a_file_brought_by_hand_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTDETR_WEIGHTS", str(tmp_path))
    name = "rtdetrv3_r18vd_6x_coco"
    (tmp_path / f"{name}.pdparams").write_bytes(CONTENT)
    monkeypatch.setitem(OFFICIAL, name, Release(OfficialFile("http://127.0.0.1:9/file", None, SHA256)))
    converted: list[Path] = []
    monkeypatch.setattr(catalogue, "convert", converted.append)
    monkeypatch.setattr(catalogue, "save_conversion", lambda done, file, out, licence: out.write_text(licence))
    for _ in range(2):
        assert located(name).read_text() == "Apache-2.0"
    assert converted == [tmp_path / f"{name}.pdparams"]


def test_every_official_file_is_that_of_a_shipped_config() -> None:
    from rtdetr.config_file import shipped_configs

    assert OFFICIAL.keys() <= shipped_configs().keys()
    files = [each.file for each in OFFICIAL.values()]
    assert all(each.sha256 and len(each.sha256) == 64 and each.url.startswith("https://") for each in files)
