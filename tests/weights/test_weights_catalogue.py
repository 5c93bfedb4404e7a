"""Weights by name: what a release of RT-DETR v1 or v2 becomes, from a server that is played here."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from golden_files import shared_data
from messages import message
from parity import write_pdparams
from PIL import Image
from test_parity_foreign import in_rtdetr, rtdetr_in_paddle, rtdetr_state
from torch import nn
from weight_cases import nano_config
from weight_server import Server

from rtdetr import RTDETRv3
from rtdetr.cli import main
from rtdetr.config import config_from_dict, config_to_dict, find_config, load_config
from rtdetr.data.class_names import OBJECTS365_CLASSES
from rtdetr.data.classes import Classes
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights import catalogue
from rtdetr.weights.catalogue import OFFICIAL, RELEASES, Release, checkpoint_of, located
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint
from rtdetr.weights.download import OfficialFile
from rtdetr.weights.load import model_from_checkpoint, read_checkpoint, stored_content, warm_start
from rtdetr.weights.official import recognise
from rtdetr.weights.official_names import official_layout, official_names
from rtdetr.weights.training_parts import OTHER_SELECTOR

NAME = "rtdetr_r18vd_o365"


@pytest.fixture
def source(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The model whose weights the server has, in the file of RT-DETR v2 that NAME stands for."""
    monkeypatch.setenv("RTDETR_WEIGHTS", str(tmp_path / "cache"))
    cfg = config_from_dict(config_to_dict(nano_config()), "nano", ["model.backbone.norm=frozen"])
    torch.manual_seed(3)
    model = build_model(cfg.model, 365)
    server.content = released(model, 2)
    offer(server, monkeypatch)
    return model


def released(model: nn.Module, version: int) -> bytes:
    """A file of RT-DETR v1 or v2 with what a model detects with."""
    own = model.state_dict()
    official = official_names(own)
    buffer = io.BytesIO()
    torch.save({"ema": {"module": rtdetr_state({official[n]: own[n] for n in official}, version)}}, buffer)
    return buffer.getvalue()


def offer(server: Server, monkeypatch: pytest.MonkeyPatch, classes: Classes = OBJECTS365_CLASSES) -> None:
    file = OfficialFile(f"{server.file().url}/rtdetr_o365.pth")
    monkeypatch.setitem(RELEASES, NAME, Release(file, None, classes, "bilinear"))


def test_a_name_becomes_a_detector_and_a_warm_start(
    source: nn.Module,
    server: Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.sent = 10_000
    with pytest.raises(CheckpointError, match=message("broken off", "bytes", "network")):
        located(NAME)
    server.sent = 1 << 40
    assert located(NAME) == checkpoint_of(NAME) and server.ranges == [None, "bytes=10000-"]
    assert message("no published hash").search(caplog.text)
    server.http.shutdown()  # from here on there is no network, and no need of it
    detector = RTDETRv3.from_pretrained(NAME, device="cpu")
    assert detector.classes == OBJECTS365_CLASSES and detector.cfg.name == NAME
    assert detector.cfg.data.interpolation == "bilinear" and detector.source is not None
    assert detector.source["licence"] == "Apache-2.0" and detector.source["url"].endswith("/file/rtdetr_o365.pth")
    own = detector.model.state_dict()  # type: ignore[union-attr]
    for name, tensor in source.state_dict().items():
        if not name.startswith(("query_groups.selectors", "query_groups.memory", "dense_head")) and "num_b" not in name:
            assert torch.equal(own[name], tensor), name
        if OTHER_SELECTOR.match(name):
            assert torch.equal(own[name], own[OTHER_SELECTOR.sub("decoder.selector.", name)]), name
    assert (stored_content(NAME) or {})["config"]["name"] == NAME
    new = build_model(detector.cfg.model, 2)
    report = warm_start(new, NAME, Classes(("zebra", "platelet"), (1, 2)))
    assert message("classes carried over", "1 of 2", "zebra", "platelet").search(report.classes)
    assert torch.equal(new.decoder.score_heads[0].weight[0], own["decoder.score_heads.0.weight"][178])
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    output = tmp_path / "found"
    assert main(["predict", str(tmp_path / "a.png"), "-w", NAME, "--output-dir", str(output), "--device", "cpu"]) == 0
    assert (output / "results.json").is_file()
    capsys.readouterr()
    assert main(["weights"]) == 0
    listed = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert (
        listed[NAME][1:6] == ["365", "-", f"{len(server.content) / 1e6:.1f}", "Apache-2.0", "yes"]
        and listed["rtdetr_r50vd_o365"][5] == "no"
    )
    assert listed["rtdetr_r50vd_coco_o365"][1:4] == ["80", "55.2", "?"]
    assert listed.keys() >= {*OFFICIAL, *RELEASES}


@pytest.mark.parametrize("file_name", ["mine.pth", "rtdetr_o365.pth"])
def test_a_file_of_a_detector_detects_by_its_path(
    source: nn.Module, server: Server, file_name: str, tmp_path: Path
) -> None:
    """One that nobody knows, and one that a name stands for: the same weights as by its name."""
    file = tmp_path / file_name
    file.write_bytes(server.content)
    model, cfg, classes = model_from_checkpoint(file)
    assert classes == OBJECTS365_CLASSES and cfg.data.interpolation == "bilinear"
    assert cfg.name == {"mine.pth": "mine"}.get(file_name, NAME)
    expected = model_from_checkpoint(NAME)[0].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    arguments = ["-w", str(file), "--output-dir", str(tmp_path / "found"), "--device", "cpu"]
    assert main(["predict", str(tmp_path / "a.png"), *arguments]) == 0


@pytest.mark.parametrize("ending", [".pth", ".pdparams"])
def test_a_file_of_a_detector_converts(
    source: nn.Module, server: Server, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RT-DETR v2 in PyTorch, v1 in Paddle: the same weights as read by its path."""
    file, output = tmp_path / f"mine{ending}", tmp_path / "out.pth"
    file.write_bytes(server.content)
    if ending == ".pdparams":
        own = source.state_dict()
        names = official_names(own)
        state = {official: official_layout(official, own[name]).numpy() for name, official in names.items()}
        write_pdparams(file, rtdetr_in_paddle(state))
    assert main(["convert", str(file), "-o", str(output), "--licence", "MIT"]) == 0
    assert f"{file}: has no training parts" in capsys.readouterr().out
    content, expected = load_checkpoint(output), read_checkpoint(file)
    assert content["source"] == {**expected["source"], "licence": "MIT"} and content["config"] == expected["config"]
    assert content["classes"] == expected["classes"] == OBJECTS365_CLASSES.entries()
    taken = [name for name in expected["model"] if name.startswith(("backbone.", "encoder.", "decoder."))]
    assert taken and all(torch.equal(content["model"][name], expected["model"][name]) for name in taken)
    assert main(["convert", str(file), "-o", str(tmp_path / "out.pdparams")]) == 2
    assert message("expected", "--output", ".pth", "out.pdparams").search(capsys.readouterr().err)
    assert not (tmp_path / "out.pdparams").exists()


@pytest.mark.parametrize("version", [1, 3])
def test_a_file_of_paddle_detects_by_its_path(source: nn.Module, version: int, tmp_path: Path) -> None:
    """RT-DETR v1, which knows detection alone, and v3. Both resize with OpenCV's cubic filter."""
    own = source.state_dict()
    names = official_names(own)
    state = {official: official_layout(official, own[name]).numpy() for name, official in names.items()}
    file = write_pdparams(tmp_path / "w.pdparams", rtdetr_in_paddle(state) if version == 1 else state)
    model, cfg, classes = model_from_checkpoint(file)
    assert classes == OBJECTS365_CLASSES and cfg.data.interpolation == "cubic" and cfg.name == "w"
    found = model.state_dict()
    for name, official in names.items():
        if version == 3 or in_rtdetr(official):
            assert torch.equal(found[name], own[name]), name
        elif OTHER_SELECTOR.match(name):
            assert torch.equal(found[name], own[OTHER_SELECTOR.sub("decoder.selector.", name)]), name
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    arguments = ["-w", str(file), "--output-dir", str(tmp_path / "found"), "--device", "cpu"]
    assert main(["predict", str(tmp_path / "a.png"), *arguments]) == 0
    file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"^{file}: [^\\n]*$"):
        RTDETRv3.from_pretrained(file, device="cpu")


def test_one_command_starts_a_training_from_a_name(source: nn.Module, tmp_path: Path) -> None:
    """As docs/weights.md has it, on blood cells, but with the small model that the server has: two steps on a CPU."""
    output, cells = tmp_path / "run", str(shared_data("bccd"))
    quick = ["train.max_iterations=2", "image_size=[64,64]", "batch_sizes=[64]", "train_batch_size=2", "num_workers=0"]
    quick += ["model.backbone.norm=frozen", "model.encoder.num_csp_blocks=1", "epochs=1"]
    fixed = ["-c", "rtdetrv3_nano_shapes", "--output-dir", str(output), "--device", "cpu"]
    assert main(["train", cells, "-t", NAME, *fixed, "-u", *quick]) == 0
    report = (output / "load_report.txt").read_text()
    assert message("classes carried over", "0 of 3", "Person, Sneakers").search(report) and "new: RBC, WBC" in report
    assert "decoder.selector.score_head.weight" in report.split("loaded in part: ")[1]
    assert "missing in the file" not in report and (output / "best.pth").is_file()


@pytest.mark.heavy  # the name of a small model trains above
def test_r18_of_objects365_starts_a_training_on_blood_cells(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of docs/weights.md with a file of its real size, and what the heads and groups start from."""
    monkeypatch.setenv("RTDETR_WEIGHTS", str(tmp_path / "cache"))
    cells, run = shared_data("bccd"), tmp_path / "run"
    cfg = load_config(find_config("rtdetrv3_r18vd_small")).model
    server.content = released(build_model(cfg, 365), 1)
    assert 70e6 < len(server.content) < 100e6
    offer(server, monkeypatch)
    quick = [
        "train.max_iterations=2",
        "image_size=[160,160]",
        "batch_sizes=[160]",
        "train_batch_size=2",
        "num_workers=0",
    ]
    assert main(["train", str(cells), "-t", NAME, "--output-dir", str(run), "--device", "cpu", "-u", *quick]) == 0
    assert "new: RBC, WBC, Platelets" in (run / "load_report.txt").read_text()
    began = read_checkpoint(run / "best.pth")["began"]
    assert began["weights"] == NAME and began["licence"] == "Apache-2.0" and began["images"] > 100
    theirs, model = read_checkpoint(NAME)["model"], build_model(cfg, 3)
    warm_start(model, NAME, Classes(("RBC", "WBC", "Platelets"), (1, 2, 3)))
    filled = model.state_dict()
    mean = theirs["decoder.selector.score_head.weight"].mean(dim=0)
    for name in filled:
        main_name = OTHER_SELECTOR.sub("decoder.selector.", name)
        if name.endswith("selector.score_head.weight"):
            assert torch.equal(filled[name], mean.expand(3, -1))  # no class of them is known
        elif name != main_name:
            assert torch.equal(filled[name], filled[main_name]), name
        elif name in theirs and name.startswith(("backbone.", "encoder.", "decoder.layers", "decoder.box_heads")):
            assert torch.equal(filled[name], theirs[name]), name


def test_files_of_no_detector_are_refused_by_their_path(source: nn.Module, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    state = torch.load(io.BytesIO(server.content), weights_only=True)["ema"]["module"]
    backbone = {name: tensor for name, tensor in state.items() if name.startswith("backbone.")}
    cut = {name: tensor for name, tensor in state.items() if not name.startswith("encoder.pan_blocks.0.conv")}
    headless = {name: tensor for name, tensor in state.items() if name != "decoder.dec_score_head.0.bias"}
    cases = {
        "not a whole detector: 365 classes, differs in 2 entries: decoder.score_heads.0.bias": headless,
        "a backbone alone is no detector": backbone,
        "neither RT-DETR v1, v2 or v3 nor a ResNet-vd": {"weight": torch.zeros(2)},
        "not a whole detector: 365 classes, differs in 15 entries: encoder": cut,
        "no weights found": {},
    }
    for sentence, entries in cases.items():
        torch.save({"model": entries}, file)
        with pytest.raises(CheckpointError, match=sentence) as error:
            model_from_checkpoint(file)
        assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_an_official_file_without_its_stem_is_described() -> None:
    names = [f"backbone.res{stage}.res{stage}{block}.branch2a.conv.weight" for stage in (2, 3, 4, 5) for block in "ab"]
    with pytest.raises(CheckpointError, match=r"got \(2, 2, 2, 2\) and no stem$"):
        recognise({name: torch.zeros(1) for name in names}, "x.pdparams")


@pytest.mark.parametrize("copied", [True, False])
def test_other_query_groups_start_as_copies_or_new(
    source: nn.Module, server: Server, copied: bool, tmp_path: Path
) -> None:
    (tmp_path / "w.pth").write_bytes(server.content)
    cfg = config_from_dict(config_to_dict(nano_config()), "nano", ["model.backbone.norm=frozen"])
    model = build_model(cfg.model, 365)
    new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = warm_start(model, tmp_path / "w.pth", OBJECTS365_CLASSES, copy_selector=copied)
    own = model.state_dict()
    others = [name for name in own if OTHER_SELECTOR.match(name)]
    assert others and (set(report.missing) >= set(others)) is not copied
    for name in others:
        expected = own[OTHER_SELECTOR.sub("decoder.selector.", name)] if copied else new[name]
        assert torch.equal(own[name], expected), name


def test_another_file_than_the_first_is_refused(source: nn.Module, server: Server, tmp_path: Path) -> None:
    located(NAME)
    checkpoint_of(NAME).unlink()
    file = tmp_path / "cache" / "releases" / "rtdetr_o365.pth"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=message("other content", "sha256", "download")):
        located(NAME)


def test_a_file_of_other_classes_is_refused(source: nn.Module, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(server, monkeypatch, Classes(("a", "b"), (1, 2)))
    with pytest.raises(CheckpointError, match=message("other classes", NAME, "2 classes", "365 classes")):
        located(NAME)
    assert not checkpoint_of(NAME).exists()


def test_without_a_network_it_says_where_the_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTDETR_WEIGHTS", str(tmp_path))
    file = OfficialFile("http://127.0.0.1:9/w.pth")
    monkeypatch.setitem(RELEASES, NAME, Release(file))
    with pytest.raises(CheckpointError, match=message("not downloaded", tmp_path, "try again")):
        model_from_checkpoint(NAME)


def test_names_of_the_hub_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(catalogue, "from_hub", lambda name: asked.append(name) or tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert located("PekingU/rtdetr_r50vd") == tmp_path and asked == ["PekingU/rtdetr_r50vd"]
    for path in ("runs/best", "new/best.pth", "best", NAME + ".pth"):
        assert located(path) == Path(path)
    Path(NAME).touch()
    assert located(NAME) == Path(NAME) and len(asked) == 1


def test_every_release_is_a_file_of_its_own_and_objects365_has_its_classes() -> None:
    urls = [release.file.url for release in RELEASES.values()]
    assert len(set(urls)) == len(urls) and all(url.startswith("https://") and url.endswith(".pth") for url in urls)
    assert len(set(OBJECTS365_CLASSES.names)) == len(OBJECTS365_CLASSES.category_ids) == 365
    names = OBJECTS365_CLASSES.names
    assert (names[0], names[16], names[364]) == ("Person", "Picture/Frame", "Table Tennis")
