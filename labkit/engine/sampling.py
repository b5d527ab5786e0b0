"""From logits to the next token: temperature, top-k, top-p, in the order `transformers` applies them."""

from collections.abc import Sequence

import torch

from labkit import _check


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuse what is out of range: temperature from 0 (greedy), top_k from 0 (off), top_p above 0 up to 1 (off)."""
    _check.number("temperature", temperature, 0.0)
    _check.integer("top_k", top_k, 0)
    _check.number("top_p", top_p, 0.0, 1.0)
    _check.require(top_p > 0, "top_p", top_p, "a number above 0 and up to 1")


def probabilities(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """The distribution `(..., vocab)` that sampling draws from, in float32; temperature 0 is all on the first maximum.

    Top-k keeps the k largest logits, of equal ones the first, so that 1 is greedy at any temperature: 16-bit logits tie
    often, and `transformers` keeps all that tie with the k-th. Top-p then keeps the fewest tokens whose probabilities
    reach p (Holtzman et al., 2020, section 3.1), the most likely one always among them.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Before the temperature, which may make equal what is not.
    largest = _largest(logits, min(top_k, logits.shape[-1])) if top_k else None
    # From the maximum down, so that a temperature near zero overflows to -inf beside a 0 and not to NaN.
    smallest = torch.finfo(torch.float32).tiny
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, smallest)
    if largest is not None:
        logits = logits.masked_fill(~largest, -torch.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        # A token goes once those before it have reached p, so that the one that crosses p stays.
        dropped = ordered.cumsum(-1) - ordered >= top_p
        dropped[..., 0] = False  # a top_p below what float32 holds is 0 there
        probs = probs.masked_fill(dropped.scatter(-1, order, dropped), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest of each row are, as a mask; `topk` itself does not say which of equal ones it takes."""
    kth = logits.topk(k).values[..., -1:]
    above, equal = logits > kth, logits == kth
    return above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """The id of the largest of `logits (..., vocab)`, `(...)`; of several, the first.

    In float32: on a CPU an argmax over 16-bit numbers takes five times as long. One function for all who decode
    greedily, since 16-bit logits tie often, and a tie must be broken in one way.
    """
    return logits.float().argmax(-1)


def seeded_generator(device: torch.device, seed: int | None) -> torch.Generator:
    """A generator of its own on `device`, never the global one; None seeds it from the system."""
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(_check.seed("seed", seed))
    return generator


def stop_ids(eos_token_id: int | Sequence[int] | None, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """The ids `(n,)` that end a row; None for none. Errors: ValueError for what is not an id of the vocabulary."""
    if eos_token_id is None:
        return None
    ids = list(eos_token_id) if isinstance(eos_token_id, Sequence) else [eos_token_id]
    _check.require(bool(ids), "eos_token_id", eos_token_id, "a token id, several, or None")
    return torch.tensor([_check.integer("eos_token_id", i, 0, vocab_size - 1) for i in ids], device=device)


def sample(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> torch.Tensor:
    """One token a row: `logits (batch, vocab)` to `(batch,)`."""
    if temperature == 0:
        return most_likely(logits)
    return torch.multinomial(probabilities(logits, temperature, top_k, top_p), 1, generator=generator).squeeze(-1)
