"""ReLU of a convolution, a bias and a residual in one kernel where cuDNN has it, and of a linear layer by cuBLAS.

PyTorch knows both fused calls, but torch.compile does not know the first one's result and takes the second one apart,
hence operators of our own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """relu(conv2d(x, weight) + bias + residual), (B, C', H', W'). No gradient.

    x: (B, C, H, W); weight: (C', C, h, w); bias: (C',); residual: (B, C', H', W'). Two memory formats: that of the
    result follows x and weight. On a GPU cuDNN's fused kernel, elsewhere three plain calls.
    """
    result: Tensor = _conv_relu(x, weight, bias, residual, stride, padding)
    return result


def conv_relu_reference(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: int, padding: int
) -> Tensor:
    """The plain twin."""
    y = F.conv2d(x, weight, bias, stride, padding)
    return F.relu(y if residual is None else y + residual)


@torch.library.custom_op("rtdetr::conv_relu", mutates_args=(), device_types="cuda")
def _conv_relu(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: int, padding: int) -> Tensor:
    sizes = ((stride, stride), (padding, padding), (1, 1), 1)
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *sizes)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *sizes)


_conv_relu.register_kernel("cpu")(conv_relu_reference)
_conv_relu.register_fake(conv_relu_reference)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x @ weight.T + bias), (..., C'). No gradient.

    x: (..., C); weight: (C', C); bias: (C',). On a GPU one kernel, elsewhere two plain calls.
    """
    result: Tensor = _linear_relu(x, weight, bias)
    return result


def linear_relu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The plain twin."""
    return F.relu(F.linear(x, weight, bias))


@torch.library.custom_op("rtdetr::linear_relu", mutates_args=(), device_types="cuda")
def _linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
    return flat.view(*x.shape[:-1], -1)


_linear_relu.register_kernel("cpu")(linear_relu_reference)
_linear_relu.register_fake(linear_relu_reference)
