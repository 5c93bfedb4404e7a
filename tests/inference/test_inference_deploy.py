"""Plans, graphs and the rule which of them runs; on a GPU the graphs against the plain twin."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from deployed_cases import made_up
from engine_helpers import tiny_config, tiny_data
from messages import message
from PIL import Image
from torch import Tensor

from rtdetr.config import Config, ConfigError, Resize
from rtdetr.data.classes import Classes
from rtdetr.data.preprocess import resize_planes_there
from rtdetr.data.resize import resize
from rtdetr.inference import deploy
from rtdetr.inference.deploy import (
    CAPTURE_AT,
    MAX_GRAPHS,
    CannotCapture,
    CapturedGraphs,
    Detector,
    GraphInput,
    Graphs,
    Plan,
    compiled,
    fast_products,
    starting_gpu,
)
from rtdetr.inference.predictor import Predictor
from rtdetr.models.deployed import DeployOptions
from rtdetr.models.postprocess import EndToEnd
from rtdetr.types import Detections

CLASSES = Classes(("mug", "pen", "cup", "jar", "lid"), (3, 7, 13, 44, 90))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny_config(tiny_data(tmp_path_factory.mktemp("deploy") / "shapes"), "data.image_size=[64, 96]")


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()


class FakeGraph:
    def __init__(self, size: GraphInput) -> None:
        self.size = size

    takes = deploy.CapturedGraph.takes


def size(batch: int, height: int = 64) -> GraphInput:
    return GraphInput(batch, height, 96, torch.uint8)


def found(graphs: CapturedGraphs, wanted: GraphInput) -> GraphInput | None:
    graph = graphs.find(wanted)
    return graph and graph.size


def test_a_size_is_captured_when_it_comes_often() -> None:
    graphs = CapturedGraphs(FakeGraph, at_once=False)
    assert [found(graphs, size(8)) for _ in range(CAPTURE_AT + 1)] == [None] * (CAPTURE_AT - 1) + [size(8)] * 2
    assert found(graphs, size(3)) == size(8)  # a short last batch goes through the larger one
    assert found(graphs, size(3, height=32)) is None
    assert found(graphs, size(16)) is None
    assert [found(graphs, size(3)) for _ in range(CAPTURE_AT)][-1] == size(3)  # it comes often, and gets its own
    assert found(graphs, size(2)) == size(3)  # the smallest that takes it


def test_capture_at_once() -> None:
    graphs = CapturedGraphs(FakeGraph, at_once=True)
    assert found(graphs, size(4)) == size(4)
    assert found(graphs, size(3)) == size(4)
    assert found(graphs, size(5)) == size(5)


def test_only_the_graphs_used_last_are_kept() -> None:
    graphs = CapturedGraphs(FakeGraph, at_once=True)
    for batch in range(1, MAX_GRAPHS + 5):
        assert found(graphs, size(batch)) == size(batch)
        assert found(graphs, size(1)) is not None
    assert len(graphs.graphs) == MAX_GRAPHS and size(1) in graphs.graphs and size(2) not in graphs.graphs


@pytest.mark.parametrize("number,in_a_row", [(MAX_GRAPHS, 1), (MAX_GRAPHS, CAPTURE_AT), (9, 1), (9, CAPTURE_AT)])
def test_sizes_in_turn_are_captured_once(number: int, in_a_row: int) -> None:
    captured = Counter[int]()
    graphs = CapturedGraphs(lambda wanted: captured.update([wanted.height]) or FakeGraph(wanted), at_once=False)
    for _ in range(20):
        for height in range(32, 32 * (number + 1), 32):
            for _ in range(in_a_row):
                graphs.find(size(1, height))
    assert set(captured.values()) == {1} and len(captured) == number


def test_sizes_that_do_not_fit_are_captured_ever_less_often() -> None:
    captured = Counter[int]()
    graphs = CapturedGraphs(lambda wanted: captured.update([wanted.height]) or FakeGraph(wanted), at_once=False)
    for _ in range(100):
        for height in range(MAX_GRAPHS + 1):
            graphs.find(size(1, height))
    assert set(captured.values()) == {5}  # at 5, 10, 20, 40 and 80 calls


@pytest.mark.parametrize(
    "plan,sentence",
    [
        (Plan(half=True), "half: expected a GPU, got cpu"),
        (Plan(graphs=True), "graphs: expected a GPU, got cpu"),
        (Plan(fuse_relu=True), "fuse_relu: expected a GPU, got cpu"),
        (Plan(kernels="plain", decode="device"), "decode: expected host, or device on a GPU"),
        (Plan(kernels="plain", resize="here"), "resize: expected one of auto, host, device"),  # type: ignore[arg-type]
        (Plan(half="on"), "half: expected one of auto, True, False, got 'on'"),  # type: ignore[arg-type]
        (Plan(graphs="always"), "graphs: expected one of auto, True, False"),  # type: ignore[arg-type]
        (Plan(compile="most"), "compile: expected one of True, False, max"),  # type: ignore[arg-type]
        (Plan(fold=False, half=True), "half: expected"),
    ],
)
def test_what_a_processor_cannot(plan: Plan, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan.on(CPU)


def test_plans() -> None:
    cuda = torch.device("cuda")
    assert Plan().on(CPU) == Plan(half=False, graphs=False, fuse_relu=False)
    assert Plan().on(cuda) == Plan(half=True, graphs="auto", fuse_relu=True)
    assert Plan(half=False).on(cuda) == Plan(half=False, fuse_relu=False)
    assert Plan(half=False, fuse_relu=True).on(cuda) == Plan(half=False, fuse_relu=True)
    assert Plan(fold=False).on(cuda) == Plan(fold=False, half=False, graphs="auto", fuse_relu=False)
    with pytest.raises(ValueError, match=message("expected", "fold", "True", "half", "fuse_relu", "False")):
        Plan(fold=False, half=True).on(torch.device("cuda"))
    with pytest.raises(TypeError, match="speed"):
        Plan(speed="high")


def predictor(cfg: Config, device: torch.device = CPU, **options: object) -> Predictor:
    return Predictor.of(made_up(), cfg, CLASSES, device, 0.0, **options)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_model_in_training_stays_in_training(cfg: Config, kernels: str) -> None:
    model = made_up().train()
    found = Predictor.of(model, cfg, CLASSES, kernels=kernels)
    assert model.training and all(each.training for each in model.modules())
    assert not any(each.training for each in found.model.modules())


def test_folded_and_plain_agree_and_the_model_stays(cfg: Config) -> None:
    model = made_up()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8)
    sizes = torch.tensor([[64, 96], [128, 48]])
    plain = Predictor.of(model, cfg, CLASSES, fold=False).predict_tensors(images, sizes)
    folded = Predictor.of(model, cfg, CLASSES).predict_tensors(images, sizes)
    torch.testing.assert_close(folded.scores, plain.scores, atol=1e-4, rtol=0)
    assert (folded.labels == plain.labels).double().mean() > 0.9  # equal scores may swap
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_detects_by_itself_runs_as_it_is(cfg: Config) -> None:
    class Fixed(EndToEnd):
        def forward(self, images: Tensor, sizes: Tensor) -> Detections:
            assert images.dtype == torch.float32 and images.max() <= 1
            boxes = torch.cat((torch.zeros_like(sizes), sizes), dim=1)[:, None]
            return Detections(torch.ones(len(images), 1), torch.ones(len(images), 1).long(), boxes)

    for options in ({"compile": True, "half": False}, {"kernels": "plain"}):
        with pytest.raises(ConfigError, match=f"^{next(iter(options))}: an exported file runs as it was exported"):
            Predictor.of(Fixed(), cfg, CLASSES, **options)  # type: ignore[arg-type]
    (found,) = Predictor.of(Fixed(), cfg, CLASSES, resize="host").predict([Image.new("RGB", (50, 40), "white")])[0]
    assert found == (7, "pen", 1.0, (0.0, 0.0, 40.0, 40.0))  # clipped to the image


def test_tensors_of_every_kind(cfg: Config) -> None:
    detect = predictor(cfg).predict_tensors
    pixels = torch.randint(0, 256, (2, 64, 96, 3), dtype=torch.uint8)
    whole = detect(pixels.permute(0, 3, 1, 2))
    floats = detect(pixels.permute(0, 3, 1, 2).contiguous() * (1 / 255))
    torch.testing.assert_close(whole.scores, floats.scores, atol=1e-4, rtol=0)
    assert whole.boxes.shape == (2, whole.scores.shape[1], 4) and whole.labels.dtype == torch.int64
    doubled = detect(pixels.permute(0, 3, 1, 2), torch.tensor([[128, 192]] * 2))
    torch.testing.assert_close(doubled.boxes, 2 * whole.boxes)
    with torch.inference_mode():
        again = detect(pixels.permute(0, 3, 1, 2))
    assert torch.equal(again.scores, whole.scores) and not again.scores.is_inference()
    for images, sentence in (
        (torch.rand(3, 64, 96), r"images: expected \(B, 3, H, W\), got \(3, 64, 96\)"),
        (pixels, "images: expected"),
        (torch.zeros(1, 3, 64, 96, dtype=torch.int64), "images: expected uint8 or floats in"),
    ):
        with pytest.raises(ValueError, match=sentence):
            detect(images)
    with pytest.raises(ValueError, match=message("expected", "sizes", "(2, 2)", "(1, 2)")):
        detect(pixels.permute(0, 3, 1, 2), torch.ones(1, 2))


def test_a_size_is_compiled_once() -> None:
    options = DeployOptions(remember_sizes=True, fuse_relu=True, fuse_linear=True, for_compiler=True)
    model = made_up("model.decoder.num_layers=1").deploy(options)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    detector = Detector(model, max_detections=9)
    detect, sizes = compiled(detector, None, backend), torch.tensor([[64.0, 64.0]])
    for _ in range(2):
        images = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
        torch.testing.assert_close(detect(images, sizes), detector(images, sizes))
    assert len(graphs) == 1  # nor does anything break it in two


class Brightest(EndToEnd):
    """Detects the brightest pixel of each image."""

    def forward(self, images: Tensor, sizes: Tensor) -> Detections:
        best = images.flatten(1).amax(1, keepdim=True)
        return Detections(best, best.long(), best[..., None] * sizes.repeat(1, 2)[:, None])


def test_every_size_is_compiled() -> None:
    """By default torch gives up after eight."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    detect = compiled(Detector(Brightest(), max_detections=1), None, backend)
    for number in range(1, 13):
        detect(torch.zeros(number, 3, 4, 4, dtype=torch.uint8), torch.ones(number, 2))
    assert len(graphs) == 12


def test_settings_of_fast_products_are_left_as_they_were() -> None:
    def settings() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()

    def detect(*_: Tensor) -> Detections:
        assert settings() == ("high", False)
        raise ConfigError("no model")

    before = settings()
    with pytest.raises(ConfigError):
        fast_products()(detect)(torch.zeros(1), torch.zeros(1))
    assert settings() == before != ("high", False)


def write_images(folder: Path, number: int) -> list[Path]:
    generator = np.random.default_rng(0)
    files = [folder / f"{i}.png" for i in range(number)]
    for i, file in enumerate(files):
        Image.fromarray(generator.integers(0, 256, (40 + i, 50, 3), dtype=np.uint8)).save(file)
    return files


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_files_give_what_images_give_one_by_one(cfg: Config, tmp_path: Path, device: str, num_threads: int) -> None:
    files = write_images(tmp_path, 11)
    (tmp_path / "4.png").write_bytes(b"no image")
    detector = predictor(cfg, torch.device(device))
    tolerance = 1e-4 if device == "cpu" else 2e-2
    for _ in range(4):  # plainly, captured, replayed
        results = list(detector.predict_files(iter(files), batch_size=4, num_threads=num_threads))
        assert [each.file for each in results] == files
        assert [bool(each.error) for each in results] == [i == 4 for i in range(11)]
        for each in results:
            if each.image is not None:
                alone = detector.predict([each.image])[0]
                scores = [one.score for one in alone]
                assert [one.score for one in each.detections] == pytest.approx(scores, abs=tolerance)
                assert each.best_score == pytest.approx(scores[0], abs=tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("interpolation", ["cubic", "bilinear", "bicubic"])
def test_resize_on_the_device_is_within_one_level(interpolation: Resize, device: str) -> None:
    generator = np.random.default_rng(0)
    for height, width, size in ((48, 64, (64, 96)), (301, 173, (64, 96)), (1, 1, (32, 64)), (64, 96, (64, 96))):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        planes = torch.from_numpy(pixels).to(device).permute(2, 0, 1)[None]
        found = resize_planes_there(planes, size, interpolation)[0].permute(1, 2, 0).cpu().numpy()
        expected = resize(pixels, size, interpolation)
        assert found.shape == expected.shape and found.dtype == np.uint8
        # on noise; torch's CUDA kernel of bicubic rounds once, Pillow between its two passes as well
        most = 2 if (interpolation, device) == ("bicubic", "cuda") else 1
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= most


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_resize_on_the_device_finds_the_same(cfg: Config, tmp_path: Path, device: str) -> None:
    files = write_images(tmp_path, 5)
    (tmp_path / "2.png").write_bytes(b"no image")
    there, here = (predictor(cfg, torch.device(device), resize=place) for place in ("device", "host"))
    for ours, theirs in zip(there.predict_files(files, 3), here.predict_files(files, 3)):
        assert ours.file == theirs.file and ours.error == theirs.error
        assert ours.best_score == pytest.approx(theirs.best_score, abs=0.02)
    with pytest.raises(ConfigError, match=message("expected", "resize", "auto", "host", "device", "'gpu'")):
        predictor(cfg, resize="gpu")


def test_reading_ahead_is_bounded_and_ends_with_the_results(cfg: Config, tmp_path: Path) -> None:
    files, asked = write_images(tmp_path, 12), 0

    def counted() -> Iterator[Path]:
        nonlocal asked
        for file in files:
            asked += 1
            yield file

    results = predictor(cfg).predict_files(counted(), batch_size=2, num_threads=1)
    next(results)
    assert asked <= 6  # the batch at work, the next one, and one that is begun
    results.close()
    assert asked <= 6


def test_opencv_works_in_the_threads_that_read(cfg: Config, tmp_path: Path) -> None:
    """Its own threads would wait, spinning, beside them."""
    files, before, seen = write_images(tmp_path, 6), cv2.getNumThreads(), []

    def read(file: Path | str) -> np.ndarray:
        seen.append(cv2.getNumThreads())
        return np.zeros((8, 8, 3), np.uint8)

    cv2.setNumThreads(3)
    try:
        first, second = (predictor(cfg).predict_files(files, 2, 1, read) for _ in range(2))
        next(first), next(second)
        first.close()
        assert cv2.getNumThreads() == 1  # the second one is not done
        assert len([*second]) == 5 and cv2.getNumThreads() == 3
        assert set(seen) == {1}
    finally:
        cv2.setNumThreads(before)


def test_no_images(cfg: Config) -> None:
    assert predictor(cfg).predict([]) == []


def test_a_failed_capture_is_one_sentence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a machine without a GPU: what the capture itself does is left out."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())

    def refuse(*_: object) -> deploy.CapturedGraph:
        raise CannotCapture("capturing 1 x 64 x 96 failed (operation not permitted)")

    monkeypatch.setattr(deploy, "CapturedGraph", refuse)
    offered = Detections(*(torch.zeros(1, 1) for _ in range(3)))
    batch = (torch.zeros(1, 3, 64, 96), torch.ones(1, 2))
    graphs = Graphs(lambda *_: offered, CPU, torch.float32, at_once=False)
    with caplog.at_level(logging.WARNING, "rtdetr"):
        assert all(graphs(*batch) is offered for _ in range(CAPTURE_AT + 2))
    assert [each.getMessage() for each in caplog.records] == [
        "detection runs without CUDA graphs, more slowly: capturing 1 x 64 x 96 failed (operation not permitted)"
    ]
    with pytest.raises(CannotCapture):
        Graphs(lambda *_: offered, CPU, torch.float32, at_once=True)(*batch)


def test_a_thread_on_another_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the replay before, which reads and writes the same memory; on a machine without a GPU."""
    done: list[str] = []
    event = SimpleNamespace(wait=lambda s: done.append(f"{s} waits"), record=lambda s: done.append(f"{s} records"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    found = Detections(*(torch.zeros(1, 1) for _ in range(3)))
    replayed = SimpleNamespace(replay=lambda *_: done.append("replays") or found, takes=lambda _: True)
    monkeypatch.setattr(deploy, "CapturedGraph", lambda *_: replayed)
    graphs = Graphs(lambda *_: found, CPU, torch.float32, at_once=True)
    for stream in ("a", "a", "b"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        assert graphs(torch.zeros(1, 3, 64, 96), torch.ones(1, 2)) is found
    first, second, third = ["a waits", "replays", "a records"], ["replays", "a records"], ["b waits", "replays"]
    assert done == [*first, *second, *third, "b records"]


@pytest.mark.gpu
@pytest.mark.parametrize("fuse_relu", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_captured_graphs_equal_the_plain_twin(cfg: Config, cuda: torch.device, half: bool, fuse_relu: bool) -> None:
    plain = predictor(cfg, cuda, graphs=False, half=half, fuse_relu=fuse_relu)
    captured = predictor(cfg, cuda, graphs=True, half=half, fuse_relu=fuse_relu)
    for batch, height, width in ((4, 64, 96), (2, 64, 96), (1, 96, 64), (4, 64, 96)):
        for dtype in (torch.uint8, torch.float32):
            images = torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8, device=cuda)
            images = images if dtype == torch.uint8 else images / 255
            sizes = torch.randint(50, 500, (batch, 2), device=cuda)
            first = captured.predict_tensors(images, sizes)
            captured.predict_tensors(images.flip(0).contiguous(), sizes)  # results of before stay as they are
            expected = plain.predict_tensors(images, sizes)
            tolerance = 2e-2 if half else 1e-3
            torch.testing.assert_close(first.scores, expected.scores, atol=tolerance, rtol=0)
            assert first.boxes.isfinite().all() and first.boxes.dtype == torch.float32
    assert len(captured._detect.captured.graphs) <= MAX_GRAPHS


@pytest.mark.gpu
def test_half_against_float32(cfg: Config, cuda: torch.device) -> None:
    half, whole = (predictor(cfg, cuda, half=half) for half in (True, False))
    images = torch.randint(0, 256, (4, 3, 64, 96), dtype=torch.uint8, device=cuda)
    for _ in range(CAPTURE_AT + 1):
        scores = [each.predict_tensors(images).scores for each in (half, whole)]
        torch.testing.assert_close(*scores, atol=2e-2, rtol=0)


@pytest.mark.gpu
def test_a_gpu_that_wakes_beside_other_work(cuda: torch.device) -> None:
    with starting_gpu(cuda):
        there = torch.ones(3, device=cuda)
    assert there.sum().item() == 3
    with pytest.raises(ConfigError, match="no weights"), starting_gpu(cuda):
        raise ConfigError("no weights")


WAITING = """
import logging, sys, torch
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from test_inference_deploy import CLASSES, Predictor, made_up
from engine_helpers import tiny_config
predictor = Predictor.of(made_up(), tiny_config(sys.argv[1], "data.image_size=[64, 96]"), CLASSES, "cuda", 0.0)
predictor.model.register_forward_pre_hook(lambda _, given: (given[0].sum().item(), None)[1])
images = torch.rand(1, 3, 64, 96)
scores = [predictor.predict_tensors(images).scores for _ in range(9)]
assert all((each - scores[0]).abs().max() < 1e-4 for each in scores)
assert torch.cuda.current_stream() == torch.cuda.default_stream()
"""


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_runs_plainly(cuda: torch.device, tmp_path: Path) -> None:
    """In a process of its own: a capture that fails leaves torch's random generator unusable."""
    tiny_data(tmp_path / "shapes")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WAITING, str(tmp_path / "shapes")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("detection runs without CUDA graphs") == 1, done.stdout


@pytest.mark.gpu
@pytest.mark.slow  # the compiler
def test_compiled_equals_plain(cfg: Config, cuda: torch.device) -> None:
    plain, compiled = (predictor(cfg, cuda, compile=compile) for compile in (False, True))
    images = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8, device=cuda)
    for _ in range(CAPTURE_AT + 1):
        scores = [each.predict_tensors(images).scores for each in (compiled, plain)]
        torch.testing.assert_close(*scores, atol=2e-2, rtol=0)
