"""The fastest way from images to detections: a folded model, on a GPU in float16 and replayed as CUDA graphs.

Detector            the plain twin: model and postprocessing, call by call
torch.compile(...)  the same, compiled; the compiled code is cached on disk for the next process
Graphs              either of them, captured once per input shape and replayed
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rtdetr.compile_settings import prepare_compiler
from rtdetr.config import ConfigError, Kernels
from rtdetr.data.preprocess import SCALE
from rtdetr.gpu_startup import load_libraries
from rtdetr.models.deployed import DeployedModel, DeployOptions
from rtdetr.models.postprocess import EndToEnd, detections
from rtdetr.models.rtdetrv3 import Network
from rtdetr.ops.kernels import using
from rtdetr.types import Detections
from rtdetr.wording import first_line

Model = Network | DeployedModel | EndToEnd
Detect = Callable[[Tensor, Tensor], Detections]  # images (B, 3, H, W), sizes (B, 2) height and width in pixels
Auto = bool | Literal["auto"]
Compile = bool | Literal["max"]

PIXEL = float(SCALE)  # a Python float, as torch.compile does not trace NumPy scalars
MAX_GRAPHS = 32  # kept at a time, each with its images; what a batch needs in between, they share
CAPTURE_AT = 5  # calls of a shape until it is captured, which does not pay for a few images
WARM_UP = 3  # calls before a graph is captured
VALUES: dict[str, tuple[Any, ...]] = {  # of the fields of a Plan
    "fold": (True, False),
    **dict.fromkeys(("half", "graphs", "fuse_relu"), ("auto", True, False)),
    "compile": (True, False, "max"),
    "resize": ("auto", "host", "device"),
    "decode": ("host", "device"),
    "kernels": ("auto", "plain"),
}

logger = logging.getLogger("rtdetr")


class Plan(NamedTuple):
    """How a model runs.

    fold: use `Network.deploy`, else the model as it is. half: float16, except heads, boxes and results in float32;
    "auto": on a GPU. graphs: CUDA graphs, captured at the fifth call with a shape ("auto") or at the first (True).
    compile: torch.compile, which takes minutes per shape and model; "max" also searches for the fastest kernels.
    fuse_relu: see `DeployOptions`; "auto": if half. resize: where images are resized to the network's input; "auto":
    tensors of a GPU on the device, all others on the host. decode: where JPEG files are decoded; "device" also resizes
    them there. kernels: "plain" runs the model without fold, half, graphs, compile and fuse_relu.
    """

    fold: bool = True
    half: Auto = "auto"
    graphs: Auto = "auto"
    compile: Compile = False
    fuse_relu: Auto = "auto"
    resize: Literal["auto", "host", "device"] = "auto"
    decode: Literal["host", "device"] = "host"
    kernels: Kernels = "auto"

    def on(self, device: torch.device) -> Plan:
        """Returns the plan with half and fuse_relu as booleans. Raises ConfigError if it cannot run on the device."""
        for name, values in VALUES.items():
            if (given := getattr(self, name)) not in values:
                raise ConfigError(f"{name}: expected one of {', '.join(map(str, values))}, got {given!r}")
        cuda = device.type == "cuda"
        if self.decode == "device" and not cuda:
            raise ConfigError(f"decode: expected host, or device on a GPU, got 'device' on {device}")
        if self.kernels == "plain":
            for name in ("half", "graphs", "compile", "fuse_relu"):
                if getattr(self, name) not in ("auto", False):
                    raise ConfigError(f"{name}: expected auto or False with kernels=plain")
            return self._replace(fold=False, half=False, graphs=False, compile=False, fuse_relu=False)
        for name in ("half", "graphs", "fuse_relu"):
            if getattr(self, name) is True and not cuda:
                raise ConfigError(f"{name}: expected a GPU, got {device}")
        if not self.fold and (self.half is True or self.fuse_relu is True):
            raise ConfigError("fold: expected True with half or fuse_relu, got False")
        half = self.fold and (cuda if self.half == "auto" else self.half)
        fuse_relu = half if self.fuse_relu == "auto" else self.fuse_relu
        return self._replace(half=half, graphs=self.graphs if cuda else False, fuse_relu=fuse_relu)


class Detector(EndToEnd):
    """Detections of images (B, 3, H, W): uint8, or floats in [0, 1]. Boxes are not clipped."""

    def __init__(self, model: Model, max_detections: int) -> None:
        super().__init__()
        self.model, self.max_detections = model, max_detections
        self.dtype = model.dtype if isinstance(model, DeployedModel) else torch.float32

    def forward(self, images: Tensor, sizes: Tensor) -> Detections:
        scaled = images.to(self.dtype)
        if images.dtype == torch.uint8:  # as preprocess.to_tensor: the product is rounded once
            scaled = scaled * PIXEL
        return detections(self.model, scaled, sizes, self.max_detections)


def build_detector(
    model: Network | EndToEnd, device: torch.device, max_detections: int, plan: Plan, in_place: bool = False
) -> tuple[Model, Detect]:
    """Returns the model and the function that runs it, both on the device. plan: as returned by `Plan.on`.

    in_place: the given model may be modified. An `EndToEnd` model, such as an exported file, runs as it is.
    """
    running: Model = model
    if isinstance(model, EndToEnd):
        plan = Plan(fold=False, half=False, graphs=False)
    elif plan.fold:
        options = DeployOptions(
            dtype=torch.float16 if plan.half else torch.float32,
            remember_sizes=True,
            fuse_linear=bool(plan.half),
            fuse_relu=bool(plan.fuse_relu),
            for_compiler=bool(plan.compile),
            in_place=in_place,
        )
        running = model.deploy(options)
    elif plan.kernels == "plain" and not in_place:  # the caller may train it
        running = copy.deepcopy(model)
    running = running.eval().to(device)
    detect: Detect = (detector := Detector(running, max_detections))
    if plan.compile:
        detect = compiled(detector, "max-autotune-no-cudagraphs" if plan.compile == "max" else None)
    if plan.kernels == "plain":
        detect = using("plain")(detect)
    if plan.half:
        detect = fast_products()(detect)
    if plan.graphs:
        detect = Graphs(detect, device, detector.dtype, plan.graphs is True)
    elif device.type == "cuda":
        detect = launched_alone()(detect)
    return running, detect


@contextlib.contextmanager
def starting_gpu(device: torch.device) -> Iterator[None]:
    """Context manager: initialises a GPU in a thread while the block runs. Its context and the libraries for
    convolutions and matrix products load at first use, which takes longer than reading and folding a model."""
    if device.type != "cuda":
        yield
        return
    with ThreadPoolExecutor(1, "rtdetr-wake") as pool:
        woken = pool.submit(load_libraries, device.index)
        yield
        woken.result()


class DetectorModule(EndToEnd):
    def __init__(self, detect: Detect) -> None:
        super().__init__()
        self.detect = detect

    def forward(self, images: Tensor, sizes: Tensor) -> Detections:
        return self.detect(images, sizes)


def compiled(detector: Detector, mode: str | None, backend: str | Callable[..., Any] = "inductor") -> Detect:
    """The detector with torch.compile, once per shape. The compiled code is cached on disk for the next process."""
    prepare_compiler()
    fast, seen = torch.compile(detector, dynamic=False, mode=mode, backend=backend), set()

    def detect(images: Tensor, sizes: Tensor) -> Detections:
        if images.shape not in seen:  # fills the caches of the model, which would cause a second compilation otherwise
            seen.add(images.shape)
            detector(images, sizes)
        return fast(images, sizes)

    return detect


# One lock for all models: `fast_products` changes settings of the process, which must not affect a float32 model
# in another thread. It is held while kernels are launched, not while they run.
_launching = threading.RLock()


@contextlib.contextmanager
def launched_alone() -> Iterator[None]:
    """Context manager, also for a function: meanwhile, no other model on a GPU launches kernels."""
    with _launching:
        yield


@contextlib.contextmanager
def fast_products() -> Iterator[None]:
    """As `launched_alone`, with TF32 in float32 matrix products, which costs no accuracy in heads that read 16-bit
    features, and without cuDNN's attention, whose kernel waits for its memory to be set to zero."""
    with _launching:
        precision, attention = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.backends.cuda.enable_cudnn_sdp(attention)


class GraphInput(NamedTuple):
    """The input for which a graph is captured."""

    batch: int
    height: int
    width: int
    dtype: torch.dtype  # of the graph's input: uint8, or that of the model


class CannotCapture(RuntimeError):
    """Raised with the reason if a CUDA graph cannot be captured."""


class CapturedGraphs:
    """Chooses the graph that runs a batch. A shape is captured once it has come often enough to be worth a second or
    two; with `at_once` at its first call, unless a graph for more images takes it. Keeps the graphs used last; to
    capture a dropped one again, its shape must have come twice as often as for the last time."""

    def __init__(self, capture: Callable[[GraphInput], CapturedGraph], at_once: bool) -> None:
        self.capture, self.at_once = capture, at_once
        self.calls: Counter[GraphInput] = Counter()
        self.capture_at: dict[GraphInput, int] = {}  # calls, where it is not CAPTURE_AT
        self.graphs: OrderedDict[GraphInput, CapturedGraph] = OrderedDict()  # the most recent last

    def find(self, size: GraphInput) -> CapturedGraph | None:
        """Returns a graph, or None if it is too early for one. Raises CannotCapture."""
        self.calls[size] += 1
        if size in self.graphs:
            self.graphs.move_to_end(size)
            return self.graphs[size]
        larger = [each for each in self.graphs.values() if each.takes(size)]
        if self.calls[size] < self.capture_at.get(size, CAPTURE_AT) and (larger or not self.at_once):
            return min(larger, key=lambda each: each.size.batch, default=None)
        if len(self.graphs) == MAX_GRAPHS:
            self.graphs.popitem(last=False)
        self.capture_at[size] = 2 * self.calls[size]
        made = self.graphs[size] = self.capture(size)
        return made


class Graphs:
    """Runs `detect` on a GPU as replayed CUDA graphs; thread-safe.

    If capture fails, it logs one sentence and runs without graphs; with `at_once` it raises the error.
    """

    def __init__(self, detect: Detect, device: torch.device, dtype: torch.dtype, at_once: bool) -> None:
        self.detect, self.device, self.dtype = detect, device, dtype
        # one memory pool for all, as only one graph runs at a time; pools are bound to a stream
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.captured = CapturedGraphs(lambda size: CapturedGraph(detect, size, stream, pool), at_once)
        self.possible = True
        self.done = torch.cuda.Event()  # of the last replay
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.here = torch.cuda.device(device)

    def __call__(self, images: Tensor, sizes: Tensor) -> Detections:
        batch, _, height, width = images.shape
        size = GraphInput(batch, height, width, torch.uint8 if images.dtype == torch.uint8 else self.dtype)
        with _launching, self.here:
            graph = self._find(size) if self.possible else None
            if graph is None:  # with a graph's dtype and layout, so that the compiler sees one kind
                kept = images.to(size.dtype).contiguous(memory_format=torch.channels_last)
                return self.detect(kept, sizes)
            # If the caller waits for each result, the GPU idles until the launch.
            stream = torch.cuda.current_stream()
            if stream != self.stream:  # a thread that uses another stream
                self.done.wait(stream)
            self.stream = stream
            found = graph.replay(images, sizes)
            self.done.record(stream)
            return found

    def _find(self, size: GraphInput) -> CapturedGraph | None:
        try:
            return self.captured.find(size)
        except CannotCapture as error:
            if self.captured.at_once:
                raise
            self.possible = False
            logger.warning("detection runs without CUDA graphs, more slowly: %s", error)
            return None


class CapturedGraph:
    """A CUDA graph, and the tensors that it reads and writes."""

    def __init__(self, detect: Detect, size: GraphInput, stream: torch.cuda.Stream, pool: Any) -> None:
        """Raises CannotCapture; the warm-up raises errors of the model itself, unchanged."""
        self.size = size
        shape = (size.batch, 3, size.height, size.width)
        images = torch.zeros(shape, dtype=size.dtype, device=stream.device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.sizes = torch.ones(size.batch, 2, device=stream.device)
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        # The outer context restores the stream, which the inner one does not do after a failure.
        with _fastest_convolutions(), torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                detect(self.images, self.sizes)
            try:
                # other threads may pin memory or wait for events meanwhile
                with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self.found = detect(self.images, self.sizes)
            except RuntimeError as error:
                what = f"capturing {size.batch} x {size.height} x {size.width}"
                raise CannotCapture(f"{what} failed ({first_line(error)})") from error
        torch.cuda.current_stream().wait_stream(stream)

    def takes(self, size: GraphInput) -> bool:
        """Whether the graph can run a batch of this size, with the rest of its own batch unused."""
        return size.batch <= self.size.batch and size[1:] == self.size[1:]

    def replay(self, images: Tensor, sizes: Tensor) -> Detections:
        number = len(images)
        fewer = number < self.size.batch
        (self.images[:number] if fewer else self.images).copy_(images, non_blocking=True)
        (self.sizes[:number] if fewer else self.sizes).copy_(sizes, non_blocking=True)
        self.graph.replay()
        # copies, because the next call overwrites the outputs
        return Detections(*(each[:number].clone() for each in self.found))


@contextlib.contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Context manager: inside, cuDNN tries its kernels and remembers the fastest for each size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
