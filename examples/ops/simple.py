"""The op in a few lines: a pyramid, points around two queries, gradients; then the same call with everything fused."""

from __future__ import annotations

import torch

from rtdetr.ops import ms_deform_attn, ms_deform_attn_fused, resolve_backend


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = ((16, 16), (8, 8), (4, 4))  # height and width of every level
    cells, heads, channels, queries, points = sum(h * w for h, w in shapes), 8, 32, 2, 4

    value = torch.randn(1, cells, heads, channels, device=device, requires_grad=True)
    locations = torch.rand(1, queries, heads, len(shapes), points, 2, device=device)  # x before y, in [0, 1]
    weights = torch.rand(1, queries, heads, len(shapes), points, device=device)
    weights = weights / weights.sum((3, 4), keepdim=True)

    output = ms_deform_attn(value, shapes, None, locations, weights)
    output.sum().backward()
    print(f"backend {resolve_backend('auto', value)}: output {tuple(output.shape)}, gradient of value", end=" ")
    print(f"reaches {int((value.grad != 0).any(-1).sum())} of {cells * heads} cells")

    # What an attention module has at hand: boxes, raw offsets and logits. Softmax and locations are computed inside.
    boxes = torch.tensor([[[[0.5, 0.5, 0.4, 0.4]], [[0.2, 0.7, 0.1, 0.3]]]], device=device)  # (B, Q, 1, 4) cxcywh
    offsets, logits = torch.randn_like(locations), torch.randn_like(weights)
    fused = ms_deform_attn_fused(value, shapes, boxes, offsets, logits)
    slow = ms_deform_attn_fused(value, shapes, boxes, offsets, logits, backend="torch")
    print(f"fused: differs from plain PyTorch by {(fused - slow).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
