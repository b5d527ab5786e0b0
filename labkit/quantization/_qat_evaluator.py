"""How a model being trained is evaluated: perplexity, and the distance to the float model on several texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel

from labkit import _check
from labkit.corpora import load_text
from labkit.models import LoadedModel
from labkit.quality import kl_divergence, perplexity
from labkit.quantization._qat_layers import FakeQuantLinear


@contextlib.contextmanager
def exact(model: PreTrainedModel) -> Iterator[None]:
    """Matrices that are being trained multiply in float32 here, so that what is measured is not their bfloat16."""
    fake_quant = [module for module in model.modules() if isinstance(module, FakeQuantLinear)]
    before = [layer.dtype for layer in fake_quant]
    for layer in fake_quant:
        layer.dtype = torch.float32
    try:
        yield
    finally:
        for layer, dtype in zip(fake_quant, before, strict=True):
            layer.dtype = dtype


class Evaluator:
    """Perplexity on the first of `texts`, and on each the distance to the float model that it was made with."""

    def __init__(self, loaded: LoadedModel, texts: Mapping[str, int], seq_len: int) -> None:
        self._seq_len = seq_len
        self._windows = {name: _windows(loaded, name, count, seq_len) for name, count in texts.items()}
        self._main = next(iter(texts))
        # Not the logits, which are a hundred times as large; the head is not quantized and makes them again.
        self._hidden = {
            name: [last_hidden(loaded.model, ids) for ids in windows] for name, windows in self._windows.items()
        }

    @torch.no_grad()
    def perplexity(self, model: PreTrainedModel) -> float:
        with exact(model):
            return perplexity(model, self._windows[self._main].flatten(), self._seq_len)

    @torch.no_grad()
    def divergence(self, model: PreTrainedModel) -> dict[str, float]:
        head, found = model.get_output_embeddings(), {}
        with exact(model):
            for name, windows in self._windows.items():
                pairs = zip(self._hidden[name], windows, strict=True)
                each = [kl_divergence(head(hidden), head(last_hidden(model, ids))) for hidden, ids in pairs]
                found[name] = sum(each) / len(each)
        return found


def _windows(loaded: LoadedModel, name: str, count: int, seq_len: int) -> torch.Tensor:
    """The first windows of a text's evaluation part, `(count, seq_len)`."""
    ids = loaded.tokenizer(load_text(name, "eval"), return_tensors="pt", verbose=False).input_ids[0]
    takes = f"at most the {len(ids) // seq_len} windows of {seq_len} tokens that {name} holds"
    _check.require(count * seq_len <= len(ids), "windows", count, takes)
    return ids[: count * seq_len].view(count, seq_len).to(loaded.model.device)


@torch.no_grad()
def last_hidden(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The last hidden state of `ids (seq_len,)`: `(seq_len, hidden_size)`."""
    return model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
