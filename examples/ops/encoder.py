"""A deformable encoder in 40 lines that learns which cells of two scales lie in a square hidden under noise."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from rtdetr.ops import ms_deform_attn_fused

SHAPES, DIM, HEADS, POINTS = ((16, 16), (8, 8)), 32, 4, 4
CENTRES = [torch.cartesian_prod((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w).flip(1) for h, w in SHAPES]
XY = torch.cat(CENTRES)  # (cells, 2) x before y, in [0, 1]


class Encoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Conv2d(1, DIM, k, k) for k in (2, 4))
        self.points = nn.ModuleList(nn.Linear(DIM, HEADS * len(SHAPES) * POINTS * 3) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Sequential(nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(layers))
        self.head = nn.Linear(DIM, 1)

    def forward(self, images: Tensor) -> Tensor:  # (B, 1, 32, 32) -> (B, cells)
        x = torch.cat([scale(images).flatten(2) for scale in self.scales], 2).transpose(1, 2)
        centre = XY.expand(len(x), -1, -1)[:, :, None]  # every cell looks around itself, at both scales
        for points, mix in zip(self.points, self.mix):
            offsets, logits = points(x).unflatten(2, (HEADS, len(SHAPES), POINTS, 3)).split((2, 1), -1)
            x = x + mix(ms_deform_attn_fused(x.unflatten(2, (HEADS, -1)), SHAPES, centre, offsets, logits[..., 0]))
        return self.head(x).squeeze(-1)


torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
for step in range(61):
    corner = torch.rand(8, 1, 2) * 0.7
    inside = ((corner < XY) & (corner + 0.3 > XY)).all(-1).float()
    square = inside[:, :256].view(8, 1, 16, 16).repeat_interleave(2, 2).repeat_interleave(2, 3)
    loss = binary_cross_entropy_with_logits(model(square + torch.randn(8, 1, 32, 32)), inside)
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}") if step % 20 == 0 else None
