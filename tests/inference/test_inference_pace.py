"""`RTDETRv3.predict` does no more than it has to, sees new weights at once, and serves several threads."""

from __future__ import annotations

import dataclasses
import io
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_cases import PIXELS, write_images
from messages import message
from PIL import ExifTags, Image
from torch import nn

import rtdetr.api
from rtdetr import Result, RTDETRv3
from rtdetr.benchmarks.infer import make_images
from rtdetr.config import ConfigError
from rtdetr.data.classes import Classes, DataError
from rtdetr.inference import images as image_module
from rtdetr.inference.deploy import fast_products
from rtdetr.inference.detection_arrays import DetectionArrays
from rtdetr.inference.draw import Detection
from rtdetr.inference.images import DeviceTensors, HostPixels, as_pixels, crop
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.processes import Readers, ReadingProcesses
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TENSOR = torch.from_numpy(PIXELS).permute(2, 0, 1)  # (3, 70, 90); the network takes 64 x 64
FITTING = torch.randint(256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def scores(model: RTDETRv3) -> np.ndarray[Any, Any]:
    return model.predict(PIXELS, threshold=0).scores


def load_all(network: nn.Module) -> None:
    network.load_state_dict({name: value * 1.1 for name, value in network.state_dict().items()})


def load_a_part(network: Any) -> None:
    head = network.decoder.score_heads[-1]
    head.load_state_dict({name: value + 1 for name, value in head.state_dict().items()})


@pytest.mark.parametrize("change", [load_all, load_a_part])
def test_weights_that_were_loaded_are_seen_at_once(model: RTDETRv3, change: Callable[[Any], None]) -> None:
    before = scores(model)
    change(model.model)
    assert not np.array_equal(scores(model), before) and model._changed()


@pytest.mark.parametrize("by_data", [False, True])
def test_an_edit_in_place_is_seen_after_refresh(model: RTDETRv3, by_data: bool) -> None:
    before = scores(model)
    assert model.model is not None and not model._changed()
    with torch.no_grad():
        for weight in model.model.decoder.score_heads[-1].parameters():
            (weight.data if by_data else weight).add_(1)  # of the first, not even torch knows
    model.refresh()
    assert not np.array_equal(scores(model), before) and model._changed()


def test_another_network_and_another_part_are_seen(model: RTDETRv3, checkpoint: Path) -> None:
    before = scores(model)
    other = RTDETRv3.from_pretrained(checkpoint, device="cpu").model
    assert other is not None
    load_a_part(other)
    model.model = other
    changed = scores(model)
    assert not np.array_equal(changed, before)
    load_a_part(model.model)  # it tells, too
    assert not np.array_equal(scores(model), changed)
    assert len(pickle.dumps(model.model)) > 0 and len(model._predictors.made) == 1  # older ones are gone


def test_predictors_of_other_sizes_share_the_folded_network(model: RTDETRv3) -> None:
    made = model._predictors
    assert made.get(64).model is made.get(96).model is made.get().model
    found = model.predict(PIXELS, size=96, threshold=0)
    alone = RTDETRv3.from_pretrained(model.weights, device="cpu").predict(PIXELS, size=96, threshold=0)
    np.testing.assert_array_equal(found.boxes, alone.boxes)
    before = made.get().model
    model.refresh()
    assert made.get(64).model is not before and len(made.made) == 1


def test_a_network_is_built_when_first_asked_for(checkpoint: Path) -> None:
    """The first predictor folds the network of the file; `model`, and predictors of other sizes, have their own."""
    model, plain = (RTDETRv3.from_pretrained(checkpoint, device="cpu") for _ in range(2))
    made = model._predictors
    np.testing.assert_array_equal(scores(model), Predictor(checkpoint, threshold=0).find([PIXELS])[0].scores)
    assert made._model is None and plain._predictors._model is None
    network, stored = model.model, load_checkpoint(checkpoint)
    assert network is not None and network is model.model is made.model
    assert all(torch.equal(tensor, stored["model"][name]) for name, tensor in network.state_dict().items())
    with torch.no_grad():
        network.decoder.score_heads[-1].bias += 1
    model.refresh()
    assert scores(model).min() > scores(plain).min() and plain._predictors._model is None
    other = Predictor(checkpoint, threshold=0)
    other.cfg = dataclasses.replace(other.cfg, data=dataclasses.replace(other.cfg.data, image_size=(96, 96)))
    found = plain.predict(PIXELS, threshold=0, size=96)
    np.testing.assert_array_equal(found.scores, other.find([PIXELS])[0].scores)


def test_training_is_seen_at_once(model: RTDETRv3, checkpoint: Path, tmp_path: Path) -> None:
    before = scores(model)
    model.train(checkpoint.parent, max_iterations=1, output_dir=tmp_path / "run", eval_every=0, optimizer__lr=1e-2)
    assert not np.array_equal(scores(model), before)


def test_a_call_visits_no_weights(model: RTDETRv3, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scores(model)

    def visited(*_: object, **__: object) -> None:
        raise AssertionError("a call walks over the network")

    for name in ("parameters", "buffers", "modules", "named_parameters", "named_modules", "state_dict"):
        monkeypatch.setattr(model.model, name, visited)
    np.testing.assert_array_equal(scores(model), expected)


def test_images_are_made_when_somebody_draws(model: RTDETRv3, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object, **__: object) -> None:
        raise AssertionError("somebody makes a PIL image")

    with monkeypatch.context() as context:
        context.setattr(Image, "fromarray", made)
        results = [model.predict(each, threshold=0) for each in (PIXELS, TENSOR)]
        results += model.predict(TENSOR.expand(2, -1, -1, -1), threshold=0)
    for each in results:
        np.testing.assert_array_equal(np.asarray(each.image), PIXELS)
        np.testing.assert_array_equal(each.boxes, results[0].boxes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("images", ["fitting", "other", "batch", "list", "sizes", "mixed"])
def test_tensors_give_what_they_give_by_way_of_the_host(checkpoint: Path, device: str, images: str) -> None:
    """`resize="host"` is the plain twin. What needs no resize, and what the host resizes, is equal to the last bit."""
    fitting, other = FITTING.to(device), TENSOR.to(device)
    given: Any = {
        "fitting": [fitting],
        "other": [other],
        "batch": torch.stack([fitting, fitting.flip(1)]),
        "list": [fitting, fitting.flip(2)],
        "sizes": [other, fitting, other[:, :50]],
        "mixed": [fitting, PIXELS, Image.fromarray(PIXELS)],
    }[images]
    model = RTDETRv3.from_pretrained(checkpoint, device=device, half=False)
    there = model._predictors.get()
    assert model.model is not None
    plain = Predictor.of(model.model, model.cfg, model.classes, model.device, half=False, resize="host")
    assert isinstance(plain._batch_of(given), HostPixels)
    stays = images in ("fitting", "batch", "list") or (device == "cuda" and images != "mixed")
    assert isinstance(there._batch_of(given), DeviceTensors) == stays
    ours, theirs = (each._batch_of(given).on(model.device).cpu().int() for each in (there, plain))
    exact = not stays or images in ("fitting", "batch", "list")
    assert (ours - theirs).abs().max() <= (0 if exact else 1)
    for mine, host in zip(there.find(given, 0.0), plain.find(given, 0.0)):
        assert abs(len(mine) - len(host)) <= (0 if device == "cpu" else 5)
        number = min(len(mine), len(host))
        np.testing.assert_allclose(mine.scores[:number], host.scores[:number], atol=0 if device == "cpu" else 2e-3)


@pytest.mark.gpu
def test_tensors_of_a_gpu_stay_there(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RTDETRv3.from_pretrained(checkpoint, device="cuda")
    there = TENSOR.cuda()
    expected = [model.predict(each, threshold=0) for each in (there, FITTING.cuda())]
    for name in ("as_pixels", "resize", "as_rgb_array"):
        monkeypatch.setattr(image_module, name, lambda *_: pytest.fail("it came to the host"))
    for _ in range(7):  # plainly, captured, replayed
        for source, before in zip((there, FITTING.cuda()), expected):
            found = model.predict(source, threshold=0)
            np.testing.assert_allclose(found.scores[:5], before.scores[:5], atol=2e-3)
            for each in model.predict(torch.stack([source] * 3), threshold=0):
                np.testing.assert_allclose(each.scores[:5], before.scores[:5], atol=2e-2)
            (floats,) = model.predict(source[None] / 255, threshold=0)
            np.testing.assert_allclose(floats.scores[:5], before.scores[:5], atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_threads_get_what_one_thread_gets(checkpoint: Path, device: str) -> None:
    model = RTDETRv3.from_pretrained(checkpoint, device=device)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (40 + 9 * i, 70, 3), dtype=np.uint8) for i in range(8)]
    middle = float(np.median(model.predict(images[0], threshold=0).scores))
    halves = ["auto", False] if device == "cpu" else ["auto", False, True]
    asked: list[dict[str, Any]] = [
        {"source": image, "threshold": threshold, "size": size, "half": half, "slices": tile}
        for image, tile in zip(images, (None, 48) * 4)
        for threshold in (0.0, middle)
        for size in (None, (64, 96))
        for half in halves
    ]
    model.warmup(sizes=[None, (64, 96)])
    for each in asked:  # every predictor has its graph
        for _ in range(6 if device == "cuda" else 1):
            model.predict(**each)
    expected = [model.predict(**each) for each in asked]
    model.refresh()  # so that threads make the predictors, too
    start = threading.Barrier(8)

    def all_of_them(first: int) -> list[tuple[int, Result]]:
        start.wait(60)
        order = [(first + i) % len(asked) for i in range(len(asked))]
        return [(number, model.predict(**asked[number])) for number in order]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(all_of_them, range(0, len(asked), len(asked) // 8)):
            for number, result in found:
                theirs = expected[number]
                if device == "cpu":
                    assert result.to_json() == theirs.to_json()
                else:  # plain at first, and captured later
                    least = asked[number]["threshold"]
                    assert (result.scores >= least).all() and (result.width, result.height) == (70, theirs.height)
                    np.testing.assert_allclose(result.scores[:3], theirs.scores[:3], atol=2e-2)


def test_predictors_are_made_once(model: RTDETRv3, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    of = Predictor.of
    monkeypatch.setattr(Predictor, "of", lambda *given, **options: made.append(options) or of(*given, **options))
    start = threading.Barrier(4)
    model.refresh()

    def ask(_: int) -> Result:
        start.wait(60)
        return model.predict(PIXELS, size=96)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert made == [{"in_place": False, "half": "auto", "compile": False}]


def test_settings_of_the_process_are_those_of_one_model_at_a_time() -> None:
    """`fast_products` of two models in two threads: each sees its settings, and those of before are put back."""

    def settings() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()

    before, inside, turn = settings(), threading.Event(), threading.Event()
    seen: list[tuple[str, bool]] = []

    def slow(*_: Any) -> Any:
        inside.set()
        turn.wait(0.2)
        seen.append(settings())

    def quick(*_: Any) -> Any:
        turn.set()
        seen.append(settings())

    nothing = torch.zeros(1)
    thread = threading.Thread(target=fast_products()(slow), args=(nothing, nothing))
    thread.start()
    inside.wait(60)
    fast_products()(quick)(nothing, nothing)
    thread.join()
    assert seen == [("high", False)] * 2 and settings() == before


def test_options_of_a_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []
    of = Predictor.of

    def recorded(*given: Any, **options: Any) -> Predictor:
        made.append(options)
        return of(*given, **options | {"compile": False})

    monkeypatch.setattr(Predictor, "of", recorded)
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu", compile=True, half=False)
    model.predict(PIXELS)
    assert made == [{"in_place": True, "half": False, "compile": True}]
    model.compile(False)
    model.predict(PIXELS)
    model.predict(PIXELS, half="auto")
    assert made[1:] == [{"in_place": False, "half": False, "compile": False}]
    model.compile("max")
    model.warmup(2)
    assert made[2:] == [{"in_place": False, "half": False, "compile": "max"}]
    with pytest.raises(DataError, match=message("expected", "half", "True", "False", "auto", "3")):
        RTDETRv3.from_pretrained(checkpoint, device="cpu", half=3)  # type: ignore[arg-type]
    (tmp_path / "model.onnx").touch()
    with pytest.raises(CheckpointError, match=message("runs as exported", "model.onnx")):
        RTDETRv3.from_pretrained(tmp_path / "model.onnx", device="cpu", compile=True)


def test_warm_up_runs_the_batches_that_were_named(model: RTDETRv3, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, ...]] = []
    monkeypatch.setattr(Predictor, "predict_tensors", lambda self, images: ran.append(tuple(images.shape)))
    model.warmup([1, 3], sizes=[None, (64, 96)])
    assert ran == [(1, 3, 64, 64), (3, 3, 64, 64), (1, 3, 64, 96), (3, 3, 64, 96)]
    with pytest.raises(DataError, match=message("expected", "batch_sizes", "whole numbers", "1", "0")):
        model.warmup(0)


def test_the_gpu_starts_before_torch_is_imported(checkpoint: Path) -> None:
    code = (
        "import sys, rtdetr, rtdetr.gpu_startup\n"
        "asked = []\n"
        "rtdetr.gpu_startup.wake_gpu = lambda device: asked.append((device, 'torch' in sys.modules))\n"
        "from rtdetr import RTDETRv3\n"
        "assert not asked and 'torch' not in sys.modules\n"
        f"RTDETRv3.from_pretrained({str(checkpoint)!r}, device='cpu')\n"
        "assert asked == [('cpu', False)], asked\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_exported_file_starts_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtdetr.api, "wake_gpu", lambda device: pytest.fail("it has a context of the GPU"))
    with pytest.raises(CheckpointError):
        RTDETRv3.from_pretrained(tmp_path / "gone.onnx", device="cpu")


@pytest.mark.parametrize(
    ("files", "on_gpu", "started", "cores", "readers", "said"),
    [
        (1023, True, False, 16, Readers(8), "8 threads"),
        (1024, True, False, 16, Readers(0, 16), "16 processes"),
        (127, True, True, 16, Readers(8), "8 threads"),
        (128, True, True, 16, Readers(0, 16), "16 processes"),
        (100_000, True, False, 64, Readers(0, 16), "16 processes"),
        (100_000, True, True, 2, Readers(2), "2 threads"),
        (100_000, False, True, 16, Readers(8), "8 threads"),
        (100_000, False, False, 1, Readers(1), "1 thread"),
    ],
)
def test_who_reads(files: int, on_gpu: bool, started: bool, cores: int, readers: Readers, said: str) -> None:
    assert Readers.choose(files, on_gpu, started, cores) == readers and str(readers) == said


def test_who_has_no_python_to_start_reads_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)  # as PyInstaller says it
    assert Readers.choose(100_000, True, True, 16) == Readers(8)
    with pytest.raises(ConfigError, match="num_processes: expected 0 where Python cannot be started again"):
        ReadingProcesses().start(2)


def test_a_list_says_who_reads_it(model: RTDETRv3, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_images(tmp_path)
    with caplog.at_level(logging.DEBUG, "rtdetr"):
        model.predict([file, file])
    assert "2 files are read by " in caplog.text


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_that_read_several_images_at_once(model: RTDETRv3, tmp_path: Path, threads: int) -> None:
    files = [tmp_path / f"{i}.png" for i in range(19)]
    for i, file in enumerate(files):
        Image.fromarray(np.roll(PIXELS[: 40 + i], 5 * i)).save(file)
    files[6].write_text("no image")
    found, one_by_one = (
        list(model._predictors.get().predict_files(files, 16, num_threads=each, threshold=0)) for each in (threads, 16)
    )
    assert [each.file for each in found] == files and [each.error != "" for each in found] == [
        i == 6 for i in range(19)
    ]
    for i, (each, other) in enumerate(zip(found, one_by_one)):
        assert each.error == other.error and each.detections == other.detections
        if not each.error:
            assert each.size == (90, 40 + i) and isinstance(each.image, np.ndarray)
            np.testing.assert_array_equal(each.image, np.roll(PIXELS[: 40 + i], 5 * i))


def test_a_processor_decodes_on_the_host(model: RTDETRv3) -> None:
    for asked, words in {"device": ("'device'", "cpu"), "gpu": ("'gpu'",)}.items():
        with pytest.raises(ConfigError, match=message("expected", "decode", "host", "device", *words)):
            Predictor.of(model.model, model.cfg, model.classes, "cpu", decode=asked)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_the_gpu_decodes_jpegs_and_leaves_the_rest_to_the_host(checkpoint: Path, tmp_path: Path) -> None:
    make_images(tmp_path, 3)
    (tmp_path / "0_turned.jpg").write_bytes(turned(PIXELS))
    (tmp_path / "1_broken.jpg").write_bytes((tmp_path / "00000.jpg").read_bytes()[:-99])
    Image.fromarray(PIXELS).save(tmp_path / "2.png")
    Image.fromarray(PIXELS[..., 0]).save(tmp_path / "3_grey.jpg")
    files = sorted(tmp_path.iterdir())
    there, here = (Predictor(checkpoint, "cuda", threshold=0, half=False, decode=place) for place in ("device", "host"))
    batches = []
    for each in (there, here):
        batch = each._empty_batch(len(files), for_files=True)
        results = each._read(each._read_stored if each is there else each.read_file, files, batch, 0, False)
        assert [file.name for file, result in zip(files, results) if result] == ["1_broken.jpg"]
        batches.append(batch.on(each.device).cpu().float())
    for file, ours, plain in zip(files, *batches):
        if "broken" not in file.name:  # nvJPEG repeats the samples of colour that libjpeg interpolates
            assert (ours - plain).abs().mean() < (4 if file.name.startswith("0000") else 1), file
    found, expected = ([*each.predict_files(files, 4)] for each in (there, here))
    for ours, plain in zip(found, expected):
        assert (ours.file, ours.error, ours.size) == (plain.file, plain.error, plain.size)
        np.testing.assert_allclose([each.score for each in ours.detections[:3]],
                                   [each.score for each in plain.detections[:3]], atol=0.05)  # fmt: skip


def turned(pixels: np.ndarray[Any, Any]) -> bytes:
    """A JPEG that EXIF lays on its side."""
    exif, stored = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(pixels).save(stored, format="JPEG", exif=exif)
    return stored.getvalue()


def test_hits_are_detections() -> None:
    classes = Classes(("a", "b"), (3, 9))
    listed = [Detection(9, "b", 0.9, (1.0, 2.0, 3.0, 4.0)), Detection(3, "a", 0.5, (0.0, 0.0, 1.0, 1.0))]
    hits = DetectionArrays.of(listed, classes)
    assert hits.class_ids.tolist() == [9, 3] and hits.names == ["b", "a"] and hits.best == 0.9
    assert (
        hits == listed and hits[0] == listed[0] and hits[1:] == listed[1:] and DetectionArrays.of(hits, classes) is hits
    )
    again = DetectionArrays(hits.boxes, hits.scores, np.array([1, 0]), classes)
    assert [each.name for each in again] == ["b", "a"] and again.detections[0].box == (1.0, 2.0, 3.0, 4.0)
    assert DetectionArrays.of([], classes) == [] and DetectionArrays.of([], classes).boxes.shape == (0, 4)


def test_images_of_every_kind_are_cut_alike() -> None:
    for image in (PIXELS, TENSOR, Image.fromarray(PIXELS)):
        np.testing.assert_array_equal(as_pixels(crop(image, (10, 20, 40, 60))), PIXELS[20:60, 10:40])
