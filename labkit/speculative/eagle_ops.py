"""A head made ready for one target: its layer in the target's dtype, beside the target's embedding and output rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from labkit import _check
from labkit.engine.decode import Decoder
from labkit.engine.placement import RotaryTable
from labkit.engine.step import LayerOps, Projection, StepOps
from labkit.kernels import dense_linear
from labkit.kv_cache.interface import StepInput
from labkit.quantization import QuantLinear, RTNConfig
from labkit.quantization.rtn import round_to_nearest
from labkit.speculative.eagle_model import EagleConfig, EagleModel
from labkit.speculative.eagle_vocabulary import DraftVocabulary
from labkit.speculative.tree import DraftTree

_GROUP = 64


@dataclass(frozen=True)
class HeadOps:
    """What a step of the head applies. `step` takes a pair for its tokens: ids, and the features before them."""

    step: StepOps
    rotary: RotaryTable
    vocabulary: DraftVocabulary
    layer_config: LlamaConfig
    target: nn.Module
    dtype: torch.dtype

    def made_for(self, target: Decoder) -> bool:
        """Whether it is this target's."""
        at = (self.vocabulary.ids.device, self.dtype)
        return self.target is target.model and at == (target.device, target.dtype)

    def level_input(self, tree: DraftTree, fed: list[int], count: int, past: list[int]) -> StepInput:
        """Where the last `count` of the nodes `fed` stand, the others having been fed in steps before; `past` places
        of each row come before the tree. A node sees those, its ancestors and itself."""
        cos, sin = self.rotary
        device = cos.device
        begin = torch.tensor(past, device=device)[:, None]
        new = fed[-count:]
        slots = begin + torch.arange(len(fed) - count, len(fed), device=device)
        positions = begin + torch.tensor([tree.depths[node - 1] - 1 for node in new], device=device)
        sees = tree.mask[new][:, fed].to(device)
        kv_len = max(past) + len(fed)
        # Column j is the tree's node j - past; below 0 it is a place before the tree.
        column = torch.arange(kv_len, device=device) - begin
        mask = sees.t()[column.clamp(0, len(fed) - 1)] & (column < len(fed))[..., None]
        mask = (mask | (column < 0)[..., None]).transpose(1, 2)
        return StepInput(slots, cos[positions], sin[positions], kv_len, mask[:, None], False)


def check_target(config: EagleConfig, target: Decoder) -> None:
    """Refuse a target of another shape than the head was trained for."""
    for name in ("hidden_size", "vocab_size"):
        got, wanted = getattr(target.model.config, name), getattr(config, name)
        takes = f"{name} {wanted}, that of {config.target}, which this head was trained for"
        _check.require(got == wanted, "target", f"a model with {name} {got}", takes)


def head_ops(model: EagleModel, target: Decoder) -> HeadOps:
    """`model` made ready for `target`: in its dtype, on its device, and packed to as many bits where it is packed."""
    dtype, device = target.dtype, target.device
    bits = _packed_bits(target.model)
    matrices = {name: module for name, module in model.named_children() if isinstance(module, nn.Linear)}
    linear = {name: _projection(module.weight.detach().to(device, dtype), bits) for name, module in matrices.items()}
    norms = {name: module for name, module in model.named_children() if isinstance(module, nn.RMSNorm)}
    norm = {name: _rms_norm(module, dtype, device) for name, module in norms.items()}
    projections = {name: linear[name] for name in matrices if name != "fuse"}
    layer = LayerOps(
        input_norm=norm["input_norm"], post_norm=norm["post_norm"], q_norm=None, k_norm=None, **projections
    )
    embed = target.model.get_input_embeddings()

    def fused(pair: tuple[Tensor, Tensor]) -> Tensor:
        tokens, features = pair
        return linear["fuse"](torch.cat((norm["embed_norm"](embed(tokens)), norm["feature_norm"](features)), dim=-1))

    output, draft_ids = _output(target.model, dtype), model.draft_ids.to(device, torch.int64)
    vocabulary = DraftVocabulary(output, draft_ids, _projection(output[draft_ids], bits))
    step = StepOps(fused, (layer,), norm["norm"], vocabulary.logits, model.config.head_dim)
    cos, sin = model.rotary_table(model.config.max_position_embeddings)
    rotary = cos[:, None].to(device, dtype), sin[:, None].to(device, dtype)
    return HeadOps(step, rotary, vocabulary, model.config.layer_config(), target.model, dtype)


def _packed_bits(target: nn.Module) -> int | None:
    """Bits of the target's packed matrices; None where it has none. A packed target's step is so short that a head in
    16 bits would be a good part of it."""
    packed = next((module for module in target.modules() if isinstance(module, QuantLinear)), None)
    return None if packed is None else packed.weight.bits


def _projection(weight: Tensor, bits: int | None) -> Projection:
    """The product with `weight (out_features, in_features)`, as it lies or rounded to `bits` and packed."""
    if bits is None:
        return functools.partial(dense_linear, weight=weight, bias=None)
    group_size = _GROUP if weight.shape[1] % _GROUP == 0 else -1
    packed = round_to_nearest(weight, RTNConfig(bits=bits, group_size=group_size))
    return QuantLinear(packed, dtype=weight.dtype).projection()


def _rms_norm(module: nn.RMSNorm, dtype: torch.dtype, device: torch.device) -> Projection:
    weight = module.weight.detach().to(device, dtype)
    return functools.partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=module.eps)


def _output(target: nn.Module, dtype: torch.dtype) -> Tensor:
    """The target's output matrix, `(vocab_size, hidden_size)`."""
    weight = target.get_output_embeddings().weight
    if not isinstance(weight, Tensor):  # packed: the head needs the numbers
        weight = weight.dequantize(dtype)
    return weight.detach().to(dtype)
