"""Rotary positions (Su et al. 2021, RoFormer, equation 34): each pair of channels turns with its own frequency."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit import _check

LAYOUTS = ("halves", "pairs")
# What these do to the frequencies depends on how long a text is; all others are fixed as the model is built.
_BY_LENGTH = ("dynamic", "longrope")


class Rotary(nn.Module):
    """Turns `(batch, heads, q_len, head_dim)` by the position of each token.

    layout: which channels make a pair. "halves": i and i + head_dim / 2 (Llama); "pairs": 2i and 2i + 1 (RoFormer,
    DeepSeek). frequencies: `(head_dim / 2,)` in radians a token; None for theta^(-2i / head_dim).
    scaling: a factor on what comes out, as some ways of stretching the context have it.
    """

    frequencies: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        *,
        frequencies: Tensor | None = None,
        scaling: float = 1.0,
        layout: str = "halves",
    ) -> None:
        super().__init__()
        self.head_dim = _check.integer("head_dim", head_dim, 2)
        _check.require(head_dim % 2 == 0, "head_dim", head_dim, "an even number: rotary positions turn pairs")
        self.layout = _check.choice("layout", layout, LAYOUTS)
        self.scaling = _check.number("scaling", scaling)
        if frequencies is None:
            theta = _check.number("theta", theta, 0)
            _check.require(theta > 0, "theta", theta, "a number above 0")
            frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        shape = tuple(_check.tensor("frequencies", frequencies).shape)
        _check.require(shape == (head_dim // 2,), "frequencies", f"shape {shape}", f"({head_dim // 2},), one a pair")
        # As attributes of the module they move with it; a copy keeps their float32 when the module changes dtype.
        self.register_buffer("frequencies", frequencies.detach().clone().float(), persistent=False)

    @classmethod
    def from_transformers(cls, rotary_emb: nn.Module, *, layout: str = "halves") -> Rotary:
        """The frequencies and the scaling of a model's own rotary module, "llama3", "linear" and "yarn" included.

        Errors: ValueError for "dynamic" and "longrope", whose frequencies depend on the length of the text.
        """
        known = all(hasattr(rotary_emb, name) for name in ("inv_freq", "attention_scaling", "rope_type"))
        _check.require(known, "rotary_emb", type(rotary_emb).__name__, "a model's rotary module, such as rotary_emb")
        kind = rotary_emb.rope_type
        _check.require(kind not in _BY_LENGTH, "rotary_emb", f"rope_type {kind!r}", "frequencies that are fixed")
        frequencies = rotary_emb.inv_freq
        return cls(2 * len(frequencies), frequencies=frequencies, scaling=rotary_emb.attention_scaling, layout=layout)

    def _apply(self, fn, recurse=True):  # noqa: ANN001, ANN202
        """Frequencies stay float32: in 16 bits a position of a few hundred already turns by the wrong angle."""
        kept = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = kept.to(self.frequencies.device)
        return self

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin `(batch, 1, q_len, head_dim / 2)` of `positions (batch, q_len)`."""
        wide = torch.promote_types(dtype, torch.float32)
        turned = positions[:, None, :, None].to(wide) * self.frequencies.to(wide)
        return (turned.cos() * self.scaling).to(dtype), (turned.sin() * self.scaling).to(dtype)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """`x (batch, heads, q_len, head_dim)`, turned; channels keep their places."""
        cos, sin = angles
        pairs = self.layout == "pairs"
        first, second = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(turned, dim=-1).flatten(-2) if pairs else torch.cat(turned, dim=-1)
