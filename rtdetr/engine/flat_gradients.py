"""Gradients side by side in one tensor, which processes average piece by piece while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rtdetr.config import ConfigError
from rtdetr.engine import distributed

ALIGNMENT = 32  # numbers, of a gradient among others: fused kernels read several at a time
PIECE = 2**22  # numbers, at least, of a piece that is averaged at once: 16 MiB


class FlatGradients:
    """The gradients of `parameters`, float32. Pieces go from the last parameter to the first, as a backward pass does.

    A pass: `expect`, the backward pass, `collect`. Every process takes the same parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], piece: int = PIECE) -> None:
        room = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
        self.parameters, self.flat = parameters, torch.zeros(sum(room), device=parameters[0].device)
        pairs = zip(self.flat.split(room), parameters)
        self.parts = [part.as_strided(parameter.shape, parameter.stride()) for part, parameter in pairs]
        self.pieces, self.ranges = _pieces(room, piece)
        self.leaves: Sequence[Tensor] = ()
        self.hooks: list[RemovableHandle] = []
        self.several = distributed.world_size() > 1
        # A communicator and a stream of its own: what the backward pass exchanges itself must not wait for it.
        self.group = distributed.another_group() if self.several else None
        on_gpu = self.several and self.flat.is_cuda
        self.stream = torch.cuda.Stream(self.flat.device, priority=-1) if on_gpu else None

    def expect(self, leaves: Sequence[Tensor]) -> None:
        """Before the backward pass. leaves: what will have the gradient of each parameter, itself or a copy of it."""
        self._forget()
        self.leaves, self.sent, self.awaited = leaves, 0, [len(piece) for piece in self.pieces]
        for number, piece in enumerate(self.pieces):
            arrived = partial(self._arrived, number)
            self.hooks += [leaves[index].register_post_accumulate_grad_hook(arrived) for index in piece]

    def collect(self) -> None:
        """After it: gives every parameter its gradient, the mean of all processes; None, as it was, where there is no
        gradient and a single process. Raises ConfigError where there are several."""
        left = [index for piece in self.pieces[self.sent :] for index in piece]
        lacking = {index for index in left if self.leaves[index].grad is None}
        if lacking and self.several:
            raise ConfigError(
                f"train.find_unused_parameters=false: {len(lacking)} parameter(s) got no gradient; set it to true"
            )
        while self.sent < len(self.pieces):
            self._send()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        for index, (parameter, part) in enumerate(zip(self.parameters, self.parts)):
            parameter.grad = None if index in lacking else part
        self._forget()

    def _arrived(self, number: int, leaf: Tensor) -> None:
        self.awaited[number] -= 1
        while self.sent < len(self.pieces) and not self.awaited[self.sent]:  # in the same order in every process
            self._send()

    def _send(self) -> None:
        """Moves the gradients of the next piece to their place and has them averaged."""
        moves: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # a kernel copies from one type
        for index in self.pieces[self.sent]:
            if (gradient := self.leaves[index].grad) is not None:
                places, gradients = moves.setdefault(gradient.dtype, ([], []))
                places.append(self.parts[index])
                gradients.append(gradient)
                self.leaves[index].grad = None
        for places, gradients in moves.values():
            torch._foreach_copy_(places, gradients)
        together = self.flat[self.ranges[self.sent]]
        self.sent += 1
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                distributed.average(together, self.group)
        elif self.several:
            distributed.average(together, self.group)

    def _forget(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.leaves = [], ()


def _pieces(room: list[int], least: int) -> tuple[list[list[int]], list[slice]]:
    """Indices of parameters with so many numbers each, from the last to the first, and where they lie together."""
    pieces: list[list[int]] = [[]]
    ranges, end, start = [], sum(room), sum(room)
    for index in reversed(range(len(room))):
        pieces[-1].append(index)
        start -= room[index]
        if end - start >= least or index == 0:
            ranges.append(slice(start, end))
            pieces, end = [*pieces, []], start
    return pieces[:-1], ranges
