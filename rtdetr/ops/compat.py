"""The attention op under the interfaces of other libraries: Deformable DETR's extension, mmcv, transformers.

`import rtdetr.ops.compat as MSDA` replaces `import MultiScaleDeformableAttention as MSDA`; `install` makes the original
import and similar ones work; `patch_transformers` changes the models of the installed transformers. Letters as in
`rtdetr.ops`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.ops import (
    Backend,
    MSDeformAttnFunction,
    SpatialShapes,
    _check,
    _host_levels,
    ms_deform_attn,
    resolve_backend,
)
from rtdetr.ops.backend import check_name, check_tensors, operator_levels, run, without_autocast
from rtdetr.ops.reference import compute_dtype

__all__ = [
    "MSDeformAttnFunction",
    "MultiScaleDeformableAttnFunction",
    "install",
    "ms_deform_attn_backward",
    "ms_deform_attn_core_pytorch",
    "ms_deform_attn_forward",
    "multi_scale_deformable_attn_pytorch",
    "patch_transformers",
    "uninstall",
    "unpatch",
    "unpatch_transformers",
]

logger = logging.getLogger("rtdetr")


# Deformable DETR and mmcv. Deformable DETR's extension has positional arguments only, so mmcv's names work for both.

MultiScaleDeformableAttnFunction = MSDeformAttnFunction
ms_deform_attn_forward = MSDeformAttnFunction.apply


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: SpatialShapes,
    value_level_start_index: Tensor | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor | int = 64,
    grad_sampling_loc: Tensor | None = None,
    grad_attn_weight: Tensor | None = None,
    im2col_step: int = 64,
) -> list[Tensor] | None:
    """Return the gradients of value, locations and weights, each of the type of its tensor.

    With seven arguments, as Deformable DETR calls it, the last is its `im2col_step`. With three tensors after
    `grad_output`, as mmcv calls it, the gradients are written into them and the result is None.
    """
    inputs = (value, sampling_locations, attention_weights)
    named = dict(zip(("value", "sampling_locations", "attention_weights"), inputs))
    check_tensors(**named, grad_output=grad_output)
    _check(value, value_spatial_shapes, sampling_locations, attention_weights)
    dtype, grad = compute_dtype(value), grad_output.to(value.dtype)
    points = [t.detach().to(dtype) for t in inputs[1:]]
    if resolve_backend("auto", value, _host_levels(value_spatial_shapes)) == "torch":
        leaves = [t.detach().requires_grad_() for t in (value, *points)]
        with torch.enable_grad(), without_autocast(value):
            output = ms_deform_attn(leaves[0], value_spatial_shapes, None, leaves[1], leaves[2], backend="torch")
        grads = torch.autograd.grad(output, leaves, grad)
    else:
        levels = operator_levels(value_spatial_shapes, value_level_start_index, value)
        flags = (True, True, True, torch.are_deterministic_algorithms_enabled())
        grads = run(torch.ops.rtdetr.ms_deform_attn_backward, grad, value.detach(), *levels, *points, *flags)
    found = [g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
    if not isinstance(grad_value, Tensor):
        return found
    if grad_sampling_loc is None or grad_attn_weight is None:
        raise TypeError(
            "grad_value: given as a tensor to fill, so grad_sampling_loc and grad_attn_weight are needed too"
        )
    for into, g in zip((grad_value, grad_sampling_loc, grad_attn_weight), found, strict=True):
        into.copy_(g)
    return None


def ms_deform_attn_core_pytorch(
    value: Tensor, value_spatial_shapes: SpatialShapes, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """Return (B, Q, H * D) by grid_sample on any device: the reference for the kernels."""
    with without_autocast(value):
        return ms_deform_attn(value, value_spatial_shapes, None, sampling_locations, attention_weights, backend="torch")


def multi_scale_deformable_attn_pytorch(
    value: Tensor, value_spatial_shapes: SpatialShapes, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """Return (B, Q, H * D): mmcv's function for other devices than GPUs; uses the device's kernel if there is one."""
    return ms_deform_attn_forward(value, value_spatial_shapes, None, sampling_locations, attention_weights)


EXTENSION = "MultiScaleDeformableAttention"
_replaced: dict[str, ModuleType | None] = {}


def install(name: str = EXTENSION, *, replace: bool = False) -> None:
    """Make `import MultiScaleDeformableAttention`, or of another extension `name` such as `groundingdino._C`, import
    this module from now on in this process.

    Raises RuntimeError if another module of this name has been imported and `replace` is False. Modules that imported
    the other one keep it.
    """
    ours, present = sys.modules[__name__], sys.modules.get(name)
    if present is ours:
        return
    if present is not None and not replace:
        where = getattr(present, "__file__", None) or "no file"
        raise RuntimeError(
            f"{name} is imported already ({where}); call install() before that import, or install(replace=True)"
        )
    _replaced[name] = present
    _place(name, ours)


def uninstall() -> None:
    """Undo every `install`: restore the previous modules, if any."""
    for name, before in _replaced.items():
        if sys.modules.get(name) is sys.modules[__name__]:
            _place(name, before)
    _replaced.clear()


def _place(name: str, module: ModuleType | None) -> None:
    """Register a module under this name, also as an attribute of its parent package if that is imported."""
    package, _, child = name.rpartition(".")
    if module is None:
        del sys.modules[name]
    else:
        sys.modules[name] = module
        if hasattr(sys.modules.get(package), child):
            setattr(sys.modules[package], child, module)


# transformers. It implements the op in three forms, with the same code in every family: a layer without parameters, a
# function, and a function with a separate number of points for each level.

LAYER, FUNCTION, UNEVEN = EXTENSION, "multi_scale_deformable_attention", "multi_scale_deformable_attention_v2"
FAMILIES = (
    *("d_fine", "deformable_detr", "deimv2", "grounding_dino", "lw_detr", "mask2former", "mm_grounding_dino"),
    *("omdet_turbo", "oneformer", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "rf_detr"),
    *("rt_detr", "rt_detr_v2"),
)
KNOWN_VERSIONS = (5, 17), (5, 24)  # first and last; the three forms are equal in all between
# In these families every attention module stores, under this name, the function that existed when it was built.
KEEPERS = {"d_fine": "ms_deformable_attn_core", "deimv2": "ms_deformable_attn_core"}
CHECK = "torch_compilable_check"

_undo: list[Callable[[], None]] = []
_changed: list[str] = []


class _Layer(nn.Module):
    """Replaces the layer of transformers by our op; also usable as a layer in its kernel mapping."""

    can_torch_compile = True
    has_backward = True
    backend: Backend = "auto"  # of everything patched: `forward` is called as a method of their layer too

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: Sequence[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        return _function(value, value_spatial_shapes_list, sampling_locations, attention_weights)


class _Repository:
    """An entry of transformers' kernel mapping that downloads nothing."""

    def load(self) -> type[nn.Module]:
        return _Layer

    def __str__(self) -> str:
        return f"{__name__} (layer {LAYER})"


def _function(
    value: Tensor, value_spatial_shapes: SpatialShapes, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    points = (sampling_locations, attention_weights)
    return ms_deform_attn(value, value_spatial_shapes, None, *points, backend=_Layer.backend)


def _uneven_function(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the third form: locations (B, Q, H, points of all levels, 2), weights (B, Q, H, points of all levels)."""

    def attend(
        value: Tensor,
        value_spatial_shapes: SpatialShapes,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        num_points_list: list[int],
        method: str = "default",
    ) -> Tensor:
        if method != "default":  # "discrete" rounds to whole cells, unlike our op
            return original(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method)
        most = max(num_points_list)
        if min(num_points_list) == most:
            shape = (len(num_points_list), most)
            locations, weights = sampling_locations.unflatten(3, shape), attention_weights.unflatten(3, shape)
        else:  # pad every level to the most points: -1 is outside the map and has weight 0
            gaps = [most - n for n in num_points_list]
            parts = zip(sampling_locations.split(num_points_list, 3), gaps, strict=True)
            locations = torch.stack([F.pad(part, (0, 0, 0, gap), value=-1.0) for part, gap in parts], 3)
            parts = zip(attention_weights.split(num_points_list, 3), gaps, strict=True)
            weights = torch.stack([F.pad(part, (0, gap)) for part, gap in parts], 3)
        return _function(_channels_first_gradient(value), value_spatial_shapes, locations, weights)

    return attend


def _channels_first_gradient(value: Tensor) -> Tensor:
    """Return `value` with its gradient in the layout of transformers' own code if the layout affects the result.

    On CPUs torch's batch norm misreads the channels-last gradient of a batch of one (2.11 to 2.15). D-FINE and DEIMv2
    have no projection between the op and a batch norm; models that have one get such a gradient with any op.
    """
    if not (value.is_cpu and len(value) == 1 and value.requires_grad) or torch.compiler.is_compiling():
        return value
    value = value.view_as(value)  # so that the hook is not attached to a leaf
    value.register_hook(lambda grad: grad.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
    return value


def _unless_compiling(check: Callable[..., None]) -> Callable[..., None]:
    """Return transformers' `check`, skipped for tensors under torch.compile, where torch 2.11 cannot trace it."""

    def check_unless_compiling(cond: Any, *more: Any, **named: Any) -> None:
        if not (isinstance(cond, Tensor) and torch.compiler.is_dynamo_compiling()):
            check(cond, *more, **named)

    return check_unless_compiling


def patch_transformers(*, backend: Backend = "auto", any_version: bool = False) -> list[str]:
    """Make the deformable attention of transformers' models use our op; return the names of all changed objects.

    Models that exist already and models built later both change; weights and outputs do not. Under autocast the
    attention of D-FINE and DEIMv2 returns the autocast type where it returned float32. Where the library `kernels` is
    in use, the entry of transformers' kernel mapping becomes ours as well, so `use_kernels=True` does not bring back
    the hub's kernel. The method "discrete" of RT-DETRv2, D-FINE and DEIMv2 keeps transformers' own code. Inside
    torch.compile the check of the tensor of map sizes is left out; our op checks the pairs, by which it samples.
    `backend` is that of `ms_deform_attn`; "torch" repeats the steps of transformers' own code, which separates effects
    of a kernel's rounding from effects of the patch. A second call changes the backend.

    Raises ValueError for an unknown backend, ModuleNotFoundError without transformers, RuntimeError for a version
    outside KNOWN_VERSIONS (unless `any_version`) or one whose functions have other arguments than the known ones;
    in these cases nothing is changed.
    """
    check_name(backend)
    if _undo:
        _Layer.backend = backend
        return list(_changed)
    if find_spec("transformers") is None:
        raise ModuleNotFoundError("transformers is not installed; to patch it: pip install transformers")
    version = importlib.import_module("transformers").__version__
    (first, last), found = KNOWN_VERSIONS, tuple(int(part) for part in version.split(".")[:2])
    if not (any_version or first <= found <= last):
        known = " to ".join(".".join(map(str, v)) for v in KNOWN_VERSIONS)
        raise RuntimeError(
            f"transformers {version}: patch_transformers knows {known}; install one of these, or try any_version=True"
        )
    present = [family for family in FAMILIES if find_spec(f"transformers.models.{family}") is not None]
    for change in [_change(family, version) for family in present]:
        _set(*change)
    for modeling in map(_modeling, present):
        if check := getattr(modeling, CHECK, None):
            _set(modeling, CHECK, _unless_compiling(check))
    _set(_Layer, "backend", backend)
    _replace_hub_layer()
    _changed.extend(f"{family}.{_attention_class(family).__name__}" for family in present)
    logger.info("transformers %s: our op in all but the method 'discrete' of %s", version, ", ".join(_changed))
    return list(_changed)


def unpatch_transformers() -> None:
    """Undo `patch_transformers`, also for existing models, except those kernelized with `use_kernels=True` since, which
    transformers itself cannot undo."""
    while _undo:
        _undo.pop()()
    _changed.clear()


unpatch = unpatch_transformers


def _modeling(family: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _attention_class(family: str) -> type[nn.Module]:
    """Return the attention module with the projections, which the layers of the model call."""
    (found,) = (
        thing for name, thing in vars(_modeling(family)).items() if name.endswith("MultiscaleDeformableAttention")
    )
    return found


def _change(family: str, version: str) -> tuple[Any, str, Any]:
    """Return owner, attribute and new value of the single change that makes a family use our op."""
    owner: Any = _modeling(family)
    name = next((each for each in (LAYER, FUNCTION, UNEVEN) if hasattr(owner, each)), "")
    old: Any = getattr(owner, name, None)
    new: Any = _function if name == FUNCTION else _uneven_function(old) if name == UNEVEN else None
    if name == LAYER:
        owner, name, old, new = old, "forward", old.forward, _Layer.forward
    if old is None or _arguments(old) != _arguments(new):
        raise RuntimeError(
            f"transformers {version}: the deformable attention of {_modeling(family).__name__} is not written as in the"
            " versions that patch_transformers knows; nothing was patched"
        )
    if name == UNEVEN and (kept := KEEPERS.get(family)):
        return _attention_class(family), kept, _shown(kept, new)
    return owner, name, new


def _arguments(function: Callable[..., Tensor]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _shown(name: str, new: Callable[..., Tensor]) -> property:
    """Return a property that yields `new` in place of an instance's attribute `name`, which stays unchanged."""

    def keep(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    return property(lambda self: new, keep)


def _set(owner: Any, name: str, new: Any) -> None:
    old = vars(owner).get(name)
    _undo.append(lambda: delattr(owner, name) if old is None else setattr(owner, name, old))
    setattr(owner, name, new)


def _replace_hub_layer() -> None:
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    if hub.is_kernels_available():
        mapping = hub.get_kernel_mapping_transformers()
        theirs = mapping[LAYER]
        _undo.append(lambda: mapping.update({LAYER: theirs}))
        mapping[LAYER] = {"cuda": _Repository()}
