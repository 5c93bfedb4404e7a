"""ReLU of a convolution, a bias and a residual in one cuDNN kernel if available, and of a linear layer by cuBLAS.

PyTorch has both fused calls, but torch.compile does not know the first one's result and decomposes the second one,
hence our own operators. They do not use torch's `custom_op`, whose first call imports the compiler, which takes as long
as importing torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """relu(conv2d(x, weight) + bias + residual), (B, C', H', W'). No gradient.

    x: (B, C, H, W); weight: (C', C, h, w); bias: (C',); residual: (B, C', H', W'). The memory format of the result
    follows x and weight. On a GPU cuDNN's fused kernel, elsewhere three plain calls.
    """
    return torch.ops.rtdetr.conv_relu(x, weight, bias, residual, stride, padding)


def conv_relu_reference(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: int, padding: int
) -> Tensor:
    """The plain twin."""
    y = F.conv2d(x, weight, bias, stride, padding)
    return F.relu(y if residual is None else y + residual)


def _conv_relu(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: int, padding: int) -> Tensor:
    sizes = ((stride, stride), (padding, padding), (1, 1), 1)
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *sizes)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *sizes)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x @ weight.T + bias), (..., C'). No gradient.

    x: (..., C); weight: (C', C); bias: (C',). On a GPU one kernel, elsewhere two plain calls.
    """
    return torch.ops.rtdetr.linear_relu(x, weight, bias)


def linear_relu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The plain twin."""
    return F.relu(F.linear(x, weight, bias))


def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
    return flat.view(*x.shape[:-1], -1)


_LIBRARY = torch.library.Library("rtdetr", "FRAGMENT")
for _schema, _on_cuda, _plain in (
    (
        "conv_relu(Tensor x, Tensor weight, Tensor bias, Tensor? residual, int stride, int padding) -> Tensor",
        _conv_relu,
        conv_relu_reference,
    ),
    ("linear_relu(Tensor x, Tensor weight, Tensor bias) -> Tensor", _linear_relu, linear_relu_reference),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
    _LIBRARY.impl(_name, _plain, "CPU")
    torch.library.register_fake(f"rtdetr::{_name}", _plain)
