"""What the section `flash_attention` measures on: how many heads, how long, and random queries, keys and values."""

from dataclasses import dataclass

from labkit.cli.gpu_sections import Recorder

_BLOCKS = ((128, 128), (64, 64), (64, 128))


@dataclass(frozen=True)
class Shape:
    """`heads` on `kv_heads` of `head_dim`; `ours` is the implementation whose figures count."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    # Lengths, each with the batch that keeps the chip full.
    sizes: tuple[tuple[int, int], ...] = ((4096, 4), (8192, 2), (16384, 1))
    doublings: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    checked: int = 2048
    min_run_s: float = 0.06
    ours: str = "labkit triton"
    blocks: tuple[tuple[int, int], ...] = _BLOCKS


TINY = Shape(2, 1, 32, ((48, 2),), (32, 64), 48, 0.0, "labkit torch", ((16, 16),))


def kind(causal: bool) -> str:
    """As the record says it."""
    return "causal" if causal else "not causal"


def inputs(recorder: Recorder, shape: Shape, length: int, batch: int, kv_heads: int | None = None) -> list:
    """q, k and v; by themselves heads are not shared, as these kernels are usually compared."""
    import torch

    # Triton's interpreter multiplies float16 alone rightly.
    options = {"dtype": torch.float16 if recorder.tiny else torch.bfloat16, "device": recorder.device}
    heads = (shape.heads, kv_heads or shape.heads, kv_heads or shape.heads)
    return [torch.randn(batch, n, length, shape.head_dim, **options) for n in heads]
