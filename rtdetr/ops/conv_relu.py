"""ReLU of a convolution, a bias and a residual in one kernel where cuDNN has it.

PyTorch knows cuDNN's fused call, but torch.compile does not know its result, hence an operator of our own.
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
