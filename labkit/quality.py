"""How good a model still is: perplexity, and how far its logits or weights are from a reference's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import _check
from labkit.models import LoadedModel, plain_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Elements of float32 logits held at a time: 64 MB, where a window of 2048 at a vocabulary of 128 k would take 1 GB.
_LOGITS_AT_ONCE = 1 << 24


def perplexity(model: PreTrainedModel | LoadedModel, token_ids: Tensor, context_length: int) -> float:
    """exp of the mean negative log likelihood of a text, over windows that do not overlap.

    model: LoadedModel or a causal LM of `transformers`. token_ids: (n_tokens,) or (1, n_tokens), integers, any device.
    Convention (GPTQ, Frantar et al. 2023): windows of context_length from the start; what is left at the end is not
    used; the first token of each window has no context and is not scored, so that context_length - 1 are. A figure
    is comparable only at the same context_length. Logits are taken in float32.
    Errors: ValueError for ids outside the vocabulary and for a text shorter than one window.
    """
    *_, (_, value) = perplexity_stream(model, token_ids, context_length)
    return value


def perplexity_stream(
    model: PreTrainedModel | LoadedModel, token_ids: Tensor, context_length: int
) -> Iterator[tuple[int, float]]:
    """As `perplexity`, window by window: yields (tokens scored so far, perplexity of those).

    Arguments are checked at the call, not at the first item.
    """
    model = plain_model(model)
    return _stream(model, checked_windows(model, token_ids, context_length))


def checked_windows(model: object, token_ids: Tensor, context_length: int) -> Tensor:
    """The whole windows of a text, `(n_windows, context_length)`, for a model that can score them."""
    complete = all(hasattr(model, name) for name in ("config", "base_model", "get_output_embeddings"))
    _check.require(complete, "model", type(model).__name__, "a LoadedModel or a causal LM of transformers")
    ids = _checked_ids(token_ids, model.config.vocab_size)
    takes = f"an integer from 2 to the {ids.numel()} tokens of token_ids"
    _check.integer("context_length", context_length, 2)
    _check.require(context_length <= ids.numel(), "context_length", context_length, takes)
    return ids[: ids.numel() // context_length * context_length].view(-1, context_length)


def _checked_ids(token_ids: Tensor, vocab_size: int) -> Tensor:
    _check.tensor("token_ids", token_ids, dtypes=(torch.int64, torch.int32))
    shape = tuple(token_ids.shape)
    flat = token_ids.ndim == 1 or (token_ids.ndim == 2 and shape[0] == 1)
    _check.require(flat and token_ids.numel() > 0, "token_ids", f"shape {shape}", "shape (n_tokens,) or (1, n_tokens)")
    ids = token_ids.reshape(-1).long()
    low, high = int(ids.min()), int(ids.max())
    takes = f"ids from 0 to {vocab_size - 1}, the model's vocabulary"
    _check.require(low >= 0 and high < vocab_size, "token_ids", f"ids from {low} to {high}", takes)
    return ids


def _stream(model: PreTrainedModel, windows: Tensor) -> Iterator[tuple[int, float]]:
    total, scored = 0.0, 0
    for window in windows:
        total += _negative_log_likelihood(model, window.to(model.device))
        scored += window.numel() - 1
        yield scored, exp_or_inf(total / scored)


def _hidden(model: PreTrainedModel, window: Tensor) -> Tensor:
    """What the head reads of a window `(context_length,)` but its last token, which has nothing to predict."""
    ids = window[None].to(model.device)
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]


@torch.no_grad()
def _negative_log_likelihood(model: PreTrainedModel, window: Tensor) -> float:
    """Sum over the tokens of a window, (context_length,), but its first; in nats. Logits are made piece by piece."""
    hidden = _hidden(model, window)
    head, targets = model.get_output_embeddings(), window[1:]
    rows = max(1, _LOGITS_AT_ONCE // model.config.vocab_size)
    total = 0.0
    for start in range(0, targets.numel(), rows):
        logits = head(hidden[start : start + rows]).float()
        total += F.cross_entropy(logits, targets[start : start + rows], reduction="sum").item()
    return total


def exp_or_inf(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _checked_pair(names: tuple[str, str], first: Tensor, second: Tensor) -> None:
    for name, value in zip(names, (first, second), strict=True):
        _check.tensor(name, value)
        _check.require(value.is_floating_point(), name, str(value.dtype), "floating-point values")
        _check.require(value.device.type != "meta", name, "a meta tensor", "a tensor that holds values")
    takes = f"the device of {names[0]}, {first.device}"
    _check.require(second.device == first.device, names[1], f"a tensor on {second.device}", takes)
    takes = f"the shape of {names[0]}, {tuple(first.shape)}"
    _check.require(second.shape == first.shape, names[1], f"shape {tuple(second.shape)}", takes)
    _check.require(first.numel() > 0, names[0], f"shape {tuple(first.shape)}", "at least one value")


def _row_pieces(p_logits: Tensor, q_logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The two sets of logits, (…, vocab_size), as pieces of float32 rows (rows, vocab_size)."""
    _checked_pair(("p_logits", "q_logits"), p_logits, q_logits)
    _check.require(p_logits.ndim > 0, "p_logits", "a scalar", "shape (…, vocab_size)")
    vocab_size = p_logits.shape[-1]
    rows = max(1, _LOGITS_AT_ONCE // vocab_size)
    pieces = (logits.reshape(-1, vocab_size).split(rows) for logits in (p_logits, q_logits))
    for p, q in zip(*pieces, strict=True):
        for name, logits in (("p_logits", p), ("q_logits", q)):
            # A row's highest logit is finite in every distribution; -inf below it excludes a token.
            proper = bool(logits.amax(-1).isfinite().all())
            _check.require(proper, name, "NaN, or a row without a finite maximum", "rows with a finite maximum")
        yield p.float(), q.float()


@torch.no_grad()
def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> float:
    """Mean over tokens of KL(p || q), in nats: p is the reference, q what stands in for it.

    p_logits, q_logits: (…, vocab_size), the same shape and device, any floating dtype; computed in float32.
    A token that p excludes (logit -inf) adds nothing; one that only q excludes makes the divergence infinite.
    Errors: ValueError for shapes that differ.
    """
    total = 0.0
    for p, q in _row_pieces(p_logits, q_logits):
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        terms = log_p.exp() * (log_p - log_q)
        total += terms.masked_fill_(log_p == -math.inf, 0.0).double().sum().item()
    return total / (p_logits.numel() // p_logits.shape[-1])


@torch.no_grad()
def top1_agreement(p_logits: Tensor, q_logits: Tensor) -> float:
    """Share of tokens at which both give the same id the highest logit, from 0 to 1; shapes as in `kl_divergence`."""
    agreeing = sum((p.argmax(-1) == q.argmax(-1)).sum().item() for p, q in _row_pieces(p_logits, q_logits))
    return agreeing / (p_logits.numel() // p_logits.shape[-1])


@torch.no_grad()
def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise: 10 log10(sum reference^2 / sum (reference - approximation)^2), in decibels.

    Two tensors of one shape, any floating dtype; computed in float64. 6.02 dB is a factor of two in amplitude, which
    is one bit; infinite where the two are equal.
    Errors: ValueError for shapes that differ, and for a reference that is zero everywhere.
    """
    _checked_pair(("reference", "approximation"), reference, approximation)
    for name, value in (("reference", reference), ("approximation", approximation)):
        _check.require(bool(value.isfinite().all()), name, "NaN or an infinity", "finite values")
    signal = reference.double().square().sum().item()
    _check.require(signal != 0.0, "reference", "zeros only", "values that are not all zero")
    noise = (reference.double() - approximation.double()).square().sum().item()
    return math.inf if noise == 0.0 else 10 * math.log10(signal / noise)


@dataclass(frozen=True)
class Comparison:
    """A model beside the one that it stands in for, on one text."""

    perplexity: float
    reference_perplexity: float
    kl: float
    top1: float

    @property
    def loss_rise(self) -> float:
        """Nats a token that the model's loss is above its reference's."""
        return math.log(self.perplexity / self.reference_perplexity)

    def __str__(self) -> str:
        rise = self.perplexity / self.reference_perplexity - 1
        figures = f"perplexity {self.perplexity:.2f} ({rise:+.1%}), KL {self.kl:.3f} nats a token"
        return f"{figures}, top-1 agreement {self.top1:.1%}"


@torch.no_grad()
def compare_models(
    reference: PreTrainedModel | LoadedModel,
    model: PreTrainedModel | LoadedModel,
    token_ids: Tensor,
    context_length: int,
) -> Comparison:
    """Both models' perplexity, KL(reference || model) and top-1 agreement on the tokens that `perplexity` scores.

    Arguments and errors as there; each model runs once, and its logits are made piece by piece.
    """
    plain = [plain_model(m) for m in (reference, model)]
    windows = [checked_windows(m, token_ids, context_length) for m in plain][0]
    sums = torch.zeros(4, dtype=torch.float64)
    for window in windows:
        hidden = [_hidden(m, window) for m in plain]
        rows = max(1, _LOGITS_AT_ONCE // plain[0].config.vocab_size)
        for start in range(0, context_length - 1, rows):
            targets = window[1 + start : 1 + start + rows]
            p, q = (
                m.get_output_embeddings()(h[start : start + rows]).float().cpu()
                for m, h in zip(plain, hidden, strict=True)
            )
            losses = [F.cross_entropy(logits, targets, reduction="sum").item() for logits in (p, q)]
            shared = len(targets) * torch.tensor([kl_divergence(p, q), top1_agreement(p, q)], dtype=torch.float64)
            sums += torch.cat((torch.tensor(losses, dtype=torch.float64), shared))
    before, after, kl, top1 = (sums / (len(windows) * (context_length - 1))).tolist()
    return Comparison(exp_or_inf(after), exp_or_inf(before), kl, top1)
