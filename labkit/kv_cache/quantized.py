"""The quantized KV cache: 8, 4 or 2 bits for what is old, full precision for what is recent."""

import torch
from transformers import PretrainedConfig

from labkit import _check
from labkit.kv_cache.interface import StepInput
from labkit.kv_cache.quantized_layer import QuantizedLayer
from labkit.kv_cache.sizing import NBITS
from labkit.kv_cache.steps import StepCheckedCache
from labkit.sizing import LlamaShape


class QuantizedCache(StepCheckedCache):
    """A cache of 8, 4 or 2 bits for `model.generate(past_key_values=cache)` and for `Decoder(model, cache=cache)`.

    nbits: of a code. q_group_size: tokens of one channel (keys) and channels of one token (values) that share a scale
    and a minimum, 16 bits each; a divisor of head_dim. residual_length: the recent tokens that stay in full precision;
    up to q_group_size more wait for their group to be complete. It can be cropped; rows may be padded on the left.
    `transformers` is given one layer dequantized at a time; `Decoder` reads the codes. A first prompt attends to its
    own keys and values before they are rounded. For inference: no gradient passes through what is rounded.
    Errors: ValueError for other numbers of bits, groups that do not divide, a model with sliding-window attention.
    """

    def __init__(
        self, config: PretrainedConfig, nbits: int = 4, q_group_size: int = 32, residual_length: int = 32
    ) -> None:
        takes = "a config, of a model of the Llama family"
        _check.require(isinstance(config, PretrainedConfig), "config", type(config).__name__, takes)
        shape = LlamaShape.of(config)
        self.nbits = _check.choice("nbits", _check.integer("nbits", nbits), NBITS)
        self.q_group_size = _check.integer("q_group_size", q_group_size, 1)
        divides = shape.head_dim % q_group_size == 0
        _check.require(divides, "q_group_size", q_group_size, f"a divisor of head_dim, {shape.head_dim}")
        self.residual_length = _check.integer("residual_length", residual_length, 0)
        sizes = (shape.num_key_value_heads, shape.head_dim, nbits, q_group_size, residual_length)
        super().__init__(layers=[QuantizedLayer(*sizes) for _ in range(shape.num_hidden_layers)])

    @property
    def batch(self) -> int:
        """Rows held."""
        keys = self.layers[0].keys
        return 0 if keys is None else keys.shape[0]

    @property
    def length(self) -> int:
        """Tokens that each row holds in every layer: the last layer is the last to take a step's."""
        return self.layers[-1].get_seq_length()

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, minimums, counters and recent tokens, over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def begin(self, tokens: torch.Tensor) -> int:
        """Forget all; nothing of a prompt is at hand."""
        self.reset()
        return 0

    def extend(self, tokens: torch.Tensor) -> None:
        """Forget what an interrupted step has left in some layers; for the rest it grows as it is written to."""
        if self.layers[0].get_seq_length() > self.length:
            self.crop_to(self.length)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, at: StepInput) -> None:
        """Take a step's `keys`, `values (batch, num_key_value_heads, q_len, head_dim)`."""
        layer = self.layers[layer_idx]
        first = layer.get_seq_length() == 0
        layer.append(keys, values)
        layer.fresh = (keys, values) if first else None

    def attend(self, layer_idx: int, query: torch.Tensor, at: StepInput) -> torch.Tensor:
        """Attention of `query (batch, num_attention_heads, q_len, head_dim)`, read from codes and recent tokens."""
        return self.layers[layer_idx].attend(query, at)

    def advance(self, q_len: int) -> None:
        """Let go of what a prompt's step attended to."""
        for layer in self.layers:
            layer.fresh = None

    def crop_to(self, length: int) -> None:
        """Forget every token from `length` on."""
        for layer in self.layers:
            layer.crop_to(length)

    def keep(self, starts: list[int], paths: list[list[int]]) -> None:
        """Of row b's tokens from `starts[b]` on, hold those at `starts[b] + i` for each i of `paths[b]` alone; all rows
        end with one length. Errors: ValueError where a token is rounded already, which those of one step are not, but
        for a first prompt's."""
        first = self.layers[0].n_quantized
        takes = f"at least {first}: what came before is in codes, and stays as it is"
        _check.require(min(starts) >= first, "start", min(starts), takes)
        pairs = zip(starts, paths, strict=True)
        chosen = [[*range(start - first), *(start - first + i for i in path)] for start, path in pairs]
        if first + len(chosen[0]) == 0:
            self.crop_to(0)
            return
        index = torch.tensor(chosen, dtype=torch.int64, device=self.layers[0].device)
        recent = [layer.recent_at(index) for layer in self.layers]
        try:
            for layer, (keys, values) in zip(self.layers, recent, strict=True):
                layer.keys, layer.values = keys, values
        except BaseException:  # an interrupt: some layers would hold the path and others still the tree
            self.crop_to(min(starts))
            raise
