"""The fused attention kernel on a GPU against plain attention in float32."""

import pytest
import torch
from torch import Tensor

from minirl.trainer.attention import Packing, packed_attention, varlen_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

LENGTHS = torch.tensor([1, 40, 7, 333, 128])
NUM_HEADS, NUM_KV_HEADS = 8, 2


def attend(dtype: torch.dtype, tensors: list[Tensor], scaling: float | None) -> list[Tensor]:
    """Output and gradients, [T, heads, D] in float32, of the mean of output * weight."""
    q, k, v = (x.to("cuda", dtype).requires_grad_() for x in tensors[:3])
    q_heads, k_heads, v_heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    packing = Packing.of(LENGTHS, torch.device("cuda"))
    out, _ = packed_attention(
        torch.nn.Module(), q_heads, k_heads, v_heads, None, packing=packing, scaling=scaling
    )
    (out[0].float() * tensors[3].cuda()).sum().backward()
    return [x.detach().float().cpu() for x in (out[0], q.grad, k.grad, v.grad) if x is not None]


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("scaling", [None, 0.25])
def test_fused_attention_is_attention(head_dim: int, scaling: float | None) -> None:
    assert varlen_kernel("cuda", torch.bfloat16) is not None
    assert varlen_kernel("cuda", torch.float32) is None  # padded rows, tested on the CPU
    generator = torch.Generator().manual_seed(head_dim)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    size = int(LENGTHS.sum())
    tensors = [
        torch.randn(size, n, head_dim, generator=generator).bfloat16().float() for n in heads
    ]
    fused = attend(torch.bfloat16, tensors, scaling)
    plain = attend(torch.float32, tensors, scaling)
    assert len(fused) == len(plain) == 4
    for ours, exact in zip(fused, plain, strict=True):
        assert (ours - exact).norm() <= 0.01 * exact.norm()
        assert (ours - exact).abs().max() <= 0.05 * exact.abs().max()
