"""torch.compile over the whole model: no graph break, and no compilation for each new size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rtdetr.config import load_config
from rtdetr.models.decoder import Decoder
from rtdetr.models.layers import Group
from rtdetr.models.rtdetrv3 import Network, build_model
from rtdetr.types import Predictions

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "rtdetrv3_r18vd_6x_coco.yml"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Batch, height, width. PyTorch compiles the first size as it is, then once for all others, with two exceptions of its
# own: a size of 1 is always a case apart (so it comes first), and sizes that were equal so far are taken to stay equal.
FIVE_SIZES = [(1, 128, 160), (3, 160, 96), (2, 128, 192), (5, 192, 128), (4, 96, 224)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def r18(device: str) -> Network:
    """On the CPU one of each kind of layer that repeats, as tracing takes half a minute for all of them."""
    torch.manual_seed(0)
    fewer = [] if device == "cuda" else ["model.decoder.num_layers=2", "model.encoder.num_csp_blocks=1"]
    return build_model(load_config(CONFIG, fewer).model, num_classes=80)


class Compiled:
    """A module compiled with fullgraph=True, where a graph break raises, and the number of its compilations."""

    def __init__(self, module: nn.Module, device: str) -> None:
        torch._dynamo.reset()
        self.count = 0
        # On the CPU only the tracing is of interest, and inductor would spend minutes in the C++ compiler.
        kind = "inductor" if device == "cuda" else "aot_eager"

        def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
            self.count += 1
            return torch._dynamo.lookup_backend(kind)(graph, examples)

        self.call = torch.compile(module, fullgraph=True, backend=backend)


@pytest.mark.heavy
def test_whole_model_in_eval_mode(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = r18(device).eval().to(device)
    compiled = Compiled(model, device)
    for batch, height, width in FIVE_SIZES:
        images = torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(height)).to(device)
        with torch.no_grad():
            actual, expected = compiled.call(images), model(images)
        assert isinstance(actual, Predictions)
        # Queries are chosen by score; where two are nearly equal rounding may swap them, so sorted scores are compared.
        for found, wanted in zip(actual.logits.amax(2).sort().values, expected.logits.amax(2).sort().values):
            torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-3)
    assert compiled.count <= 2


class DecoderStep(nn.Module):
    """The decoder as training runs it: maps to memory, queries behind a mask, a loss of every layer's output."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, maps: list[Tensor], content: Tensor, box_logits: Tensor, visible: Tensor) -> Tensor:
        first = len(visible)
        groups = (Group(first, visible), Group(content.shape[1] - first, None))
        decoded = self.decoder(content, box_logits, self.decoder.remember(maps), groups)
        return decoded.logits.sigmoid().mean() + decoded.boxes.square().mean()


@pytest.mark.slow
def test_training_step_of_the_decoder(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    step = DecoderStep(r18(device).decoder.train()).to(device)
    compiled = Compiled(step, device)
    parameters = [p for name, p in step.named_parameters() if "selector" not in name]
    for i, (batch, height, width) in enumerate(FIVE_SIZES):
        generator = torch.Generator().manual_seed(i)
        maps = [
            torch.randn(batch, 256, height // s, width // s, generator=generator).to(device).requires_grad_()
            for s in (8, 16, 32)
        ]
        queries = 40 + 3 * i
        content = torch.randn(batch, queries, 256, generator=generator).to(device).requires_grad_()
        box_logits = torch.randn(batch, queries, 4, generator=generator).to(device)
        visible = torch.ones(queries - 20, queries - 20, dtype=torch.bool, device=device)
        visible[:10, 10:] = False
        losses = [call(maps, content, box_logits, visible) for call in (compiled.call, step)]
        torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-4)
        grads = [torch.autograd.grad(loss, [*maps, content, *parameters], allow_unused=True) for loss in losses]
        for found, wanted in zip(*grads, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                assert (found - wanted).norm() <= 2e-2 * wanted.norm() + 1e-7
    assert compiled.count <= 2
