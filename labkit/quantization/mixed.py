"""Which matrices need their bits: what rounding each one alone costs, and the best bits under a budget of bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit.kernels.bits import PACKED_BITS
from labkit.models import LoadedModel, plain_model
from labkit.quantization.calibration import check_calibration
from labkit.quantization.plan import check_weights, plan
from labkit.quantization.primitives import group_length
from labkit.quantization.rtn import RTNConfig, round_to_nearest


@torch.no_grad()
def sensitivity(
    model: PreTrainedModel | LoadedModel,
    config: RTNConfig,
    token_ids: torch.Tensor,
    *,
    names: Sequence[str] | None = None,
    modules_to_not_convert: Sequence[str] = ("lm_head",),
) -> Iterator[tuple[str, float]]:
    """For each matrix in turn: its name, and KL(model || model with this matrix alone rounded), in nats a token.

    token_ids: `(n_samples, seq_len)`. names: these matrices only. The rounded weight is multiplied in full precision,
    since what it costs in quality is the question and not what it saves. Arguments are checked at the call; the model
    is as it was after each item.
    """
    model = plain_model(model)
    linears = plan(model, modules_to_not_convert).linears
    chosen = list(linears) if names is None else list(names)
    for name in chosen:
        _check.require(name in linears, "names", name, _check.near(name, linears))
    check_weights({name: linears[name] for name in chosen}, config)
    return _alone(model, {name: linears[name] for name in chosen}, config, check_calibration(model, token_ids))


@torch.no_grad()
def _alone(
    model: PreTrainedModel, linears: Mapping[str, nn.Linear], config: RTNConfig, ids: torch.Tensor
) -> Iterator[tuple[str, float]]:
    ids = ids.to(model.device)
    reference = [_log_probabilities(model, sample) for sample in ids]
    for name, linear in linears.items():
        weight = linear.weight.data
        linear.weight.data = round_to_nearest(weight, config).dequantize().to(weight.dtype)
        try:
            pairs = zip(ids, reference, strict=True)
            losses = [
                F.kl_div(_log_probabilities(model, sample), known, log_target=True, reduction="batchmean")
                for sample, known in pairs
            ]
        finally:
            linear.weight.data = weight
        yield name, torch.stack(losses).mean().item()


def _log_probabilities(model: PreTrainedModel, sample: torch.Tensor) -> torch.Tensor:
    """`(seq_len, vocab_size)` in float32."""
    return model(input_ids=sample[None], use_cache=False).logits[0].float().log_softmax(-1)


def stored_bytes(linear: nn.Linear, bits: int, config: object) -> int:
    """Bytes of one matrix at `bits` with the config's groups, in the portable layout: codes, scales, zero points and
    act-order's index. Layouts for one processor's matmul take a few percent more."""
    out_features, in_features = linear.weight.shape
    group = group_length(in_features, config.group_size)
    each = 2 if config.sym else 3
    index = 4 * in_features if getattr(config, "desc_act", False) and group < in_features else 0
    return out_features * (4 * -(-in_features * bits // 32) + each * in_features // group) + index


def choose_bits(
    losses: Mapping[str, float],
    linears: Mapping[str, nn.Linear],
    config: object,
    budget: int,
    *,
    measured_bits: int = 3,
    allowed: Sequence[int] = (3, 4, 8),
) -> dict[str, int]:
    """Bits for each matrix so that the losses' sum is small and the bytes stay within `budget`.

    losses: what rounding each matrix to `measured_bits` adds, as `sensitivity` finds it. Another bit halves the step,
    and a loss that is quadratic in the error falls to a quarter: that is how it is carried to other widths. Starts from
    the fewest bits and buys what saves most loss a byte, one width at a time (greedy: right to within one matrix).
    Errors: ValueError where the fewest bits already pass the budget, with the least that is needed.
    """
    widths = sorted(set(allowed))
    for bits in widths:
        _check.choice("allowed", bits, PACKED_BITS)
    _check.require(set(losses) == set(linears), "losses", f"{len(losses)} names", f"one for each of {len(linears)}")
    sizes = {name: {bits: stored_bytes(linears[name], bits, config) for bits in widths} for name in linears}
    left = budget - sum(size[widths[0]] for size in sizes.values())
    _check.require(left >= 0, "budget", budget, f"at least {budget - left} bytes, for {widths[0]} bits everywhere")
    chosen = dict.fromkeys(linears, widths[0])
    queue = []

    def offer(name: str) -> None:
        """Put the next width of a matrix up for sale, at its gain a byte."""
        at = widths.index(chosen[name])
        if at + 1 < len(widths):
            now, then = widths[at], widths[at + 1]
            price = sizes[name][then] - sizes[name][now]
            gain = losses[name] * (4.0 ** (measured_bits - now) - 4.0 ** (measured_bits - then))
            heapq.heappush(queue, (-gain / price, price, name, then))

    for name in linears:
        offer(name)
    while queue:
        _, price, name, then = heapq.heappop(queue)
        if price <= left:
            left -= price
            chosen[name] = then
            offer(name)
    return chosen
