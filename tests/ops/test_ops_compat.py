"""The op under the names of other libraries: their signatures, their results, and transformers' models on it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from messages import message
from ops_cases import TOLERANCE, Inputs, Shapes, make_inputs, relative, require
from torch import Tensor, nn
from transformers_models import inputs, tiny_model

from rtdetr.ops import Backend, MSDeformAttnFunction, compat, ms_deform_attn
from rtdetr.ops.reference import ms_deform_attn_reference

SHAPES: Shapes = ((9, 7), (5, 4), (1, 3))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    require("torch", request.param)
    return request.param


def tensors(x: Inputs) -> tuple[Tensor, ...]:
    """The five tensors of the extensions, on the device of value."""
    shapes = torch.tensor(x.shapes, device=x.value.device)
    cells = shapes.prod(1)
    return x.value, shapes, cells.cumsum(0) - cells, x.locations, x.weights


def expected(x: Inputs) -> tuple[Tensor, ...]:
    x = x.double()
    leaves = x.leaves()
    output = ms_deform_attn_reference(leaves[0], x.shapes, leaves[1], leaves[2])
    return output, *torch.autograd.grad(output, leaves, x.grad)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_extension_forward_and_backward(device: str, dtype: torch.dtype) -> None:
    x = make_inputs(SHAPES, 2, 5, 3, 8, 2, dtype=dtype).to(device)
    output = compat.ms_deform_attn_forward(*tensors(x), 64)
    grads = compat.ms_deform_attn_backward(*tensors(x), x.grad, 64)
    assert isinstance(grads, list)
    for actual, wanted in zip((output, *grads), expected(x), strict=True):
        assert relative(actual, wanted) <= TOLERANCE[dtype]
    assert [g.dtype for g in grads] == [x.value.dtype, x.locations.dtype, x.weights.dtype]


def test_backward_of_the_torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "resolve_backend", lambda *_: "torch")
    x = make_inputs(SHAPES, 2, 5, 3, 8, 2)
    with torch.no_grad():  # as inside a backward
        grads = compat.ms_deform_attn_backward(*tensors(x), x.grad, 64)
    for actual, wanted in zip(grads or [], expected(x)[1:], strict=True):
        assert relative(actual, wanted) <= TOLERANCE[torch.float32] and not actual.requires_grad


def test_backward_fills_the_tensors_of_mmcv(device: str) -> None:
    x = make_inputs(SHAPES, 2, 5, 3, 8, 2).to(device)
    filled = [torch.zeros_like(t) for t in (x.value, x.locations, x.weights)]
    assert compat.ms_deform_attn_backward(*tensors(x), x.grad, *filled, im2col_step=64) is None
    for actual, wanted in zip(filled, expected(x)[1:], strict=True):
        assert relative(actual, wanted) <= TOLERANCE[torch.float32]
    with pytest.raises(TypeError, match="grad_sampling_loc"):
        compat.ms_deform_attn_backward(*tensors(x), x.grad, filled[0])


def test_backward_takes_what_forward_takes(device: str) -> None:
    """Pairs of integers and no starts too; and refuses what forward refuses."""
    x = make_inputs(SHAPES, 2, 5, 3, 8, 2).to(device)
    value, shapes, starts, locations, weights = tensors(x)
    wanted = compat.ms_deform_attn_backward(value, shapes, starts, locations, weights, x.grad, 64)
    for given, start in ((x.shapes, None), (shapes, None), (shapes.int(), starts.int())):
        grads = compat.ms_deform_attn_backward(value, given, start, locations, weights, x.grad, 64)
        assert all(relative(a, b) <= TOLERANCE[torch.float32] for a, b in zip(grads or [], wanted or [], strict=True))
    for call in (compat.ms_deform_attn_forward, lambda *t: compat.ms_deform_attn_backward(*t[:5], x.grad, t[5])):
        with pytest.raises(
            ValueError, match=message("expected", "spatial_shapes", "integers", "(L, 2)", "torch.float32")
        ):
            call(value, shapes.float(), starts, locations, weights, 64)
        with pytest.raises(ValueError, match=message("expected", "value", "floating-point", "torch.int64")):
            call(value.long(), shapes, starts, locations, weights, 64)
        with pytest.raises(ValueError, match=r"attention_weights: expected .* got \(2, 4, 3, 3, 2\)"):
            call(value, shapes, starts, locations, weights[:, 1:], 64)


def test_functions_on_meta_tensors() -> None:
    x = make_inputs(SHAPES, 2, 5, 3, 8, 2).to("meta")
    assert compat.MSDeformAttnFunction.apply(x.value, x.shapes, None, x.locations, x.weights, 64).shape == x.grad.shape


def test_16_bit_points_get_16_bit_gradients() -> None:
    """mmcv casts locations and weights to the type of value."""
    x = make_inputs(SHAPES, 1, 5, 2, 8, 2, dtype=torch.float16)
    value, shapes, starts, locations, weights = tensors(x)
    grads = compat.ms_deform_attn_backward(value, shapes, starts, locations.half(), weights.half(), x.grad, 64)
    assert [g.dtype for g in grads or []] == [torch.float16] * 3


def test_signatures_of_the_originals() -> None:
    """Names and order of mmcv's extension; the places of Deformable DETR's, which has no names."""
    shared = ["value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights"]
    filled = ["grad_output", "grad_value", "grad_sampling_loc", "grad_attn_weight"]
    assert list(inspect.signature(compat.ms_deform_attn_forward).parameters) == [*shared, "im2col_step"]
    assert list(inspect.signature(compat.ms_deform_attn_backward).parameters) == [*shared, *filled, "im2col_step"]
    for plain in (compat.ms_deform_attn_core_pytorch, compat.multi_scale_deformable_attn_pytorch):
        assert list(inspect.signature(plain).parameters) == [shared[0], shared[1], shared[3], shared[4]]
    assert compat.MultiScaleDeformableAttnFunction is compat.MSDeformAttnFunction is MSDeformAttnFunction


def test_functions_agree_with_the_core_and_differentiate(device: str) -> None:
    x = make_inputs(((4, 3), (2, 2)), 2, 3, 2, 3, 2, dtype=torch.float64).to(device)
    value, shapes, starts, locations, weights = tensors(x)
    core = compat.ms_deform_attn_core_pytorch(value, shapes, locations, weights)
    assert relative(compat.MSDeformAttnFunction.apply(value, shapes, starts, locations, weights, 2), core) <= 1e-12
    assert relative(compat.multi_scale_deformable_attn_pytorch(value, shapes, locations, weights), core) <= 1e-12
    assert torch.autograd.gradcheck(
        lambda v, p, w: compat.MSDeformAttnFunction.apply(v, shapes, starts, p, w, 2), x.leaves()
    )


def test_type_of_value_stays_under_autocast(device: str) -> None:
    x = make_inputs(SHAPES, 1, 5, 2, 8, 2).to(device)
    plain = compat.MSDeformAttnFunction.apply(*tensors(x), 64)
    with torch.autocast(device, torch.bfloat16):
        cast = compat.MSDeformAttnFunction.apply(*tensors(x), 64)
        core = compat.ms_deform_attn_core_pytorch(x.value, x.shapes, x.locations, x.weights)
        mmcv = compat.multi_scale_deformable_attn_pytorch(x.value, x.shapes, x.locations, x.weights)
    assert torch.equal(cast, plain) and core.dtype == mmcv.dtype == torch.float32


@pytest.fixture
def extension_name() -> Iterator[str]:
    before = sys.modules.pop(compat.EXTENSION, None)
    yield compat.EXTENSION
    compat.uninstall()
    sys.modules.pop(compat.EXTENSION, None)
    if before is not None:
        sys.modules[compat.EXTENSION] = before


def test_install_and_uninstall(extension_name: str) -> None:
    compat.install()
    compat.install()
    assert importlib.import_module(extension_name) is compat
    compat.uninstall()
    assert extension_name not in sys.modules


def test_install_refuses_beside_the_real_one(extension_name: str) -> None:
    real = sys.modules[extension_name] = ModuleType(extension_name)
    with pytest.raises(RuntimeError, match=message("imported already", "install()")):
        compat.install()
    assert sys.modules[extension_name] is real
    compat.install(replace=True)
    assert sys.modules[extension_name] is compat
    compat.uninstall()
    assert sys.modules[extension_name] is real


@pytest.mark.parametrize("built", [False, True])
def test_install_under_the_name_that_a_project_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    """GroundingDINO says `from groundingdino import _C`: before its extension was built, and over the one it has."""
    (tmp_path / "some_dino").mkdir()
    (tmp_path / "some_dino/__init__.py").touch()
    if built:
        (tmp_path / "some_dino/_C.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    read = "from some_dino import _C\nfound = _C"
    before: dict[str, Any] = {}
    try:
        if built:
            exec(read, before)
            with pytest.raises(RuntimeError, match=r"some_dino\._C is imported already"):
                compat.install("some_dino._C")
        compat.install("some_dino._C", replace=built)
        during: dict[str, Any] = {}
        exec(read, during)
        assert during["found"] is compat
        compat.uninstall()
        if built:
            after: dict[str, Any] = {}
            exec(read, after)
            assert after["found"] is before["found"]
        else:
            with pytest.raises(ImportError):
                exec(read, {})
    finally:
        compat.uninstall()
        for name in ("some_dino._C", "some_dino"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("points", [[2, 2, 2], [3, 1, 2]])
def test_uneven_points_per_level(points: list[int]) -> None:
    """The third form of transformers against our op, level by level."""
    x = make_inputs(SHAPES, 2, 5, 3, 8, 3)
    attend = compat._uneven_function(lambda *_: pytest.fail("the original ran"))
    locations = torch.cat([x.locations[:, :, :, level, :n] for level, n in enumerate(points)], 3)
    weights = torch.cat([x.weights[:, :, :, level, :n] for level, n in enumerate(points)], 3)
    used = torch.zeros_like(x.weights)
    for level, n in enumerate(points):
        used[:, :, :, level, :n] = x.weights[:, :, :, level, :n]
    wanted = ms_deform_attn(x.value, x.shapes, None, x.locations, used)
    assert relative(attend(x.value, list(x.shapes), locations, weights, points), wanted) <= 1e-6


def test_points_that_fill_up_a_level_read_nothing() -> None:
    """The second level has one point and gets a second one, which must not touch the inf in the middle of the map."""
    value = torch.ones(1, 18, 1, 4)
    value[:, [4, 13]] = float("inf")
    attend = compat._uneven_function(lambda *_: pytest.fail("the original ran"))
    output = attend(value, [(3, 3), (3, 3)], torch.full((1, 1, 1, 3, 2), 0.1), torch.ones(1, 1, 1, 3), [2, 1])
    assert output.isfinite().all()


def test_discrete_method_stays_with_the_original() -> None:
    x = make_inputs(SHAPES, 1, 5, 2, 8, 2)
    attend = compat._uneven_function(lambda *arguments: torch.tensor(arguments[-1] == "discrete"))
    assert attend(x.value, x.shapes, x.locations, x.weights, [2, 2, 2], method="discrete")


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


@pytest.fixture
def patch(transformers: Any) -> Iterator[Callable[[], list[str]]]:
    yield compat.patch_transformers
    compat.unpatch_transformers()


def attention_code(family: str) -> object:
    """What a family's attention runs: a function of transformers, or what the patch put there."""
    modeling = compat._modeling(family)
    if layer := getattr(modeling, compat.LAYER, None):
        return layer.forward
    shown = vars(compat._attention_class(family)).get(compat.KEEPERS.get(family, ""))
    return shown or getattr(modeling, compat.FUNCTION, None) or getattr(modeling, compat.UNEVEN)


def test_without_transformers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install transformers"):
        compat.patch_transformers()


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "5.99.0", "6.0.0.dev0"])
def test_unknown_versions_are_refused(
    transformers: Any, patch: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"transformers {version}: patch_transformers knows 5\.17 to 5\.24"):
        patch()
    assert patch(any_version=True)


def test_other_arguments_are_refused_before_anything_changes(
    patch: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = attention_code("d_fine")
    monkeypatch.setattr(compat._modeling("rt_detr_v2"), compat.UNEVEN, lambda value, shapes: value)
    with pytest.raises(RuntimeError, match=message("other version", "modeling_rt_detr_v2")):
        patch()
    assert attention_code("d_fine") is before


def test_patch_names_its_classes_and_unpatch_undoes_all(patch: Callable[[], list[str]]) -> None:
    present = [f for f in compat.FAMILIES if find_spec(f"transformers.models.{f}")]
    before = {family: attention_code(family) for family in present}
    modules = {family: dict(vars(compat._modeling(family))) for family in present}
    changed = patch()
    assert [
        name.split(".")[0] for name in changed
    ] == present and "rt_detr.RTDetrMultiscaleDeformableAttention" in changed
    after = {family: attention_code(family) for family in present}
    assert all(after[family] is not before[family] for family in present)
    assert patch() == changed and {family: attention_code(family) for family in present} == after
    compat.unpatch()
    assert {family: attention_code(family) for family in present} == before
    assert {family: vars(compat._modeling(family)) for family in present} == modules


def test_kernel_mapping_offers_our_layer(patch: Callable[[], list[str]]) -> None:
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    if not hub.is_kernels_available():
        pytest.skip("the library kernels is not installed, or not in a version that transformers takes")
    theirs = hub.get_kernel_mapping_transformers()[compat.LAYER]
    patch()
    layers = importlib.import_module("kernels.layer.layer")
    ours = hub.get_kernel_mapping_transformers()[compat.LAYER]["cuda"]
    layers._validate_layer(
        check_cls=compat._modeling("rt_detr").MultiScaleDeformableAttention, cls=ours.load(), repo=ours
    )
    compat.unpatch_transformers()
    assert hub.get_kernel_mapping_transformers()[compat.LAYER] is theirs


def built(family: str) -> nn.Module:
    if find_spec(f"transformers.models.{family}") is None:
        pytest.skip(f"this transformers has no {family}")
    return tiny_model(family)


def outputs_of(model: nn.Module, family: str) -> dict[str, Tensor]:
    """Logits, boxes and masks, where they are finite: two-stage models mark places without a proposal by inf."""
    found = {k: v for k, v in model(**inputs(family)).items() if re.search("logits|boxes|masks", k)}
    return {k: v for k, v in found.items() if torch.is_tensor(v) and v.is_floating_point() and v.isfinite().all()}


def gradients_of(model: nn.Module, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    loss = sum((v * torch.rand(v.shape, generator=generator)).sum() for v in outputs.values() if v.requires_grad)
    assert isinstance(loss, Tensor)
    loss.backward()
    return {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", compat.FAMILIES)
def test_patched_model_equals_unpatched(
    patch: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    original, early = built(family), built(family)
    outputs = outputs_of(original, family)
    grads = gradients_of(original, outputs)
    scale = torch.stack([g.norm() for g in grads.values()]).norm()
    patch()
    calls: list[int] = []
    monkeypatch.setattr(compat, "ms_deform_attn", lambda *t, **k: calls.append(1) or ms_deform_attn(*t, **k))
    for model in (early, built(family)):  # built before the patch, and after it
        calls.clear()
        new_outputs = outputs_of(model, family)
        new_grads = gradients_of(model, new_outputs)
        assert any(g.any() for name, g in new_grads.items() if "sampling_offsets" in name)
        assert calls and new_outputs.keys() == outputs.keys() and new_grads.keys() == grads.keys()
        for name, wanted in outputs.items():
            torch.testing.assert_close(new_outputs[name], wanted, rtol=0, atol=1e-4)
        for name, wanted in grads.items():  # some gradients are rounding and nothing else
            assert (new_grads[name] - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6 * scale, name
    compat.unpatch_transformers()
    calls.clear()
    with torch.no_grad():
        for name, wanted in outputs_of(model, family).items():
            torch.testing.assert_close(wanted, outputs[name], rtol=0, atol=1e-4)
    assert not calls


@pytest.mark.parametrize("family", ["rt_detr", "deformable_detr", "rt_detr_v2", "d_fine"])  # each form, each way to it
def test_the_backend_is_chosen_by_name(
    patch: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = built(family).eval()
    wanted = outputs_of(model, family)
    chosen: set[str] = set()

    def record(*tensors: Any, backend: Backend) -> Tensor:
        chosen.add(backend)
        return ms_deform_attn(*tensors, backend=backend)

    monkeypatch.setattr(compat, "ms_deform_attn", record)
    with pytest.raises(ValueError, match=message("expected", "backend", "auto, cuda, cpu, torch", "'triton'")):
        patch(backend="triton")
    for backend in ("torch", "auto", "torch"):  # the second and third call change it
        patch(backend=backend)
        chosen.clear()
        for name, output in outputs_of(model, family).items():
            torch.testing.assert_close(output, wanted[name], rtol=0, atol=1e-4)
        assert chosen == {backend}
    compat.unpatch()
    patch()
    chosen.clear()
    outputs_of(model, family)
    assert chosen == {"auto"}


@pytest.mark.parametrize("family", compat.KEEPERS)
def test_batch_of_one_on_a_processor(patch: Callable[[], list[str]], family: str) -> None:
    """torch's batch norm misreads a gradient of the layout that ours would have there."""
    model = built(family)
    one = {k: v[:1] for k, v in inputs(family).items()}

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        logits = model(**one).logits
        (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)).sum().backward()
        return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}

    wanted = gradients()
    scale = torch.stack([g.norm() for g in wanted.values()]).norm()
    patch()
    for name, grad in gradients().items():
        assert (grad - wanted[name]).norm() <= 1e-4 * wanted[name].norm() + 1e-6 * scale, name


def test_discrete_model_stays_as_it_is(patch: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("rt_detr_v2")
    for module in model.modules():
        if isinstance(module, compat._attention_class("rt_detr_v2")):
            module.method = "discrete"
    before = outputs_of(model, "rt_detr_v2")
    patch()
    monkeypatch.setattr(compat, "ms_deform_attn", lambda *_: pytest.fail("our op ran"))
    assert all(torch.equal(v, before[k]) for k, v in outputs_of(model, "rt_detr_v2").items())


def attention_call(model: nn.Module, family: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The first attention module of a model and what it was called with."""
    kind, calls = compat._attention_class(family), []
    module = next(m for m in model.modules() if isinstance(m, kind))
    hook = module.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True)
    model(**inputs(family))
    hook.remove()
    return module, *calls[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", compat.FAMILIES)
def test_patched_attention_compiles_in_one_graph(
    monkeypatch: pytest.MonkeyPatch, patch: Callable[[], list[str]], family: str
) -> None:
    model = built(family)
    # transformers' check of a tensor cannot be traced by torch 2.11; this one, which branches, by no torch.
    monkeypatch.setattr(compat._modeling(family), compat.CHECK, lambda cond, *_: None if cond else pytest.fail("wrong"))
    patch()
    torch._dynamo.reset()
    module, args, kwargs = attention_call(model, family)
    wanted = module(*args, **kwargs)[0]
    actual = torch.compile(module, fullgraph=True, backend="aot_eager")(*args, **kwargs)[0]
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    actual.sum().backward()
    assert module.sampling_offsets.weight.grad.any()


def test_wrong_sizes_of_maps_are_refused(patch: Callable[[], list[str]]) -> None:
    """Eager by transformers, which looks at the tensor; compiled by our op, which looks at the pairs."""
    module, args, kwargs = attention_call(built("rt_detr_v2"), "rt_detr_v2")
    patch()
    torch._dynamo.reset()
    (height, width), *rest = kwargs["spatial_shapes_list"]
    with pytest.raises(ValueError, match="align the spatial shapes with the sequence length"):
        module(*args, **kwargs | {"spatial_shapes": kwargs["spatial_shapes"] + 1})
    with pytest.raises((RuntimeError, ValueError), match=message("cells differ", "352", "336")):
        torch.compile(module, backend="aot_eager")(
            *args, **kwargs | {"spatial_shapes_list": [(height + 1, width), *rest]}
        )
