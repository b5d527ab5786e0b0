"""Lets a cache see the queries and the mask: hooks on a model's attention that act for that one cache."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit import _check
from labkit.kv_cache.evicting import EvictingCache, EvictingLayer, checked_shape
from labkit.models import LoadedModel


class WatchedLayer(EvictingLayer):
    """A layer whose `observe` gets each step's queries after `update` has taken the step's keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.watching = False
        self.query: Tensor | None = None

    def require_watched(self) -> None:
        """Refuse an `update` that does not come from the attention module with the hooks."""
        takes = "the model that the cache was made with, called as transformers calls it"
        _check.require(self.watching, "past_key_values", f"a {type(self).__name__} in another model", takes)

    def observe(self, query: Tensor, scaling: float) -> None:
        """Called once a step with the rotated queries `(batch, num_attention_heads, q_len, head_dim)`."""
        raise NotImplementedError


class WatchedCache(EvictingCache):
    """A cache of WatchedLayers for one model. Its hooks go when it goes; the model keeps nothing of it alive."""

    layers: list[WatchedLayer]

    def __init__(self, model: PreTrainedModel | LoadedModel, layers: list[WatchedLayer]) -> None:
        model = plain(model)
        super().__init__(model.config, layers)
        self._watch(model)

    def _watch(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        reference, handles = weakref.ref(self), []
        for module in _attention_modules(model):
            handles += _hooks(module, reference)
        self._finalizer = weakref.finalize(self, _remove, handles)

    def __deepcopy__(self, memo: dict[int, object]) -> WatchedCache:
        """A copy that is watched for itself, so that one prompt's cache may be continued in several ways."""
        model = self._model()
        _check.require(model is not None, "cache", "a cache whose model is gone", "a cache whose model still exists")
        other = object.__new__(type(self))
        memo[id(self)] = other
        private = {"_model", "_finalizer"}
        other.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in private})
        other._watch(model)
        return other


def plain(model: PreTrainedModel | LoadedModel) -> PreTrainedModel:
    """The model of `transformers` itself. Errors: ValueError for one whose attention cannot be watched."""
    model = model.model if isinstance(model, LoadedModel) else model
    takes = "a LoadedModel or a model of transformers, not compiled: a compiled one runs no hooks"
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    got = f"{type(model).__name__}{', compiled' if compiled else ''}"
    _check.require(isinstance(model, PreTrainedModel) and not compiled, "model", got, takes)
    checked_shape(model.config)
    return model


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention of each layer, in order."""
    found = [m for m in model.modules() if all(hasattr(m, name) for name in ("q_proj", "layer_idx", "scaling"))]
    expected = list(range(model.config.num_hidden_layers))
    takes = f"a model with one attention module a layer that has q_proj, layer_idx and scaling: {len(expected)} layers"
    at = [m.layer_idx for m in found]
    _check.require(at == expected, "model", f"{type(model).__name__} with such modules at layers {at}", takes)
    return found


def _hooks(module: nn.Module, reference: weakref.ref) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Three hooks: before the attention, on its finished queries, after it. Each does nothing for another cache."""
    idx, own = module.layer_idx, weakref.ref(module)

    def before(called: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        cache = reference()
        if cache is not None:
            layer = cache.layers[idx]
            # A deep copy of the model takes the hooks along; it is another model all the same.
            layer.watching = kwargs.get("past_key_values") is cache and called is own()
            if layer.watching and idx == 0:
                _refuse_mask(kwargs.get("attention_mask"), layer, kwargs["hidden_states"].shape[1])

    def on_query(_: nn.Module, args: tuple, output: Tensor) -> None:
        cache = reference()
        if cache is not None and cache.layers[idx].watching:
            cache.layers[idx].query = output.detach()

    def after(_: nn.Module, args: tuple, kwargs: dict[str, object], output: object) -> None:
        cache = reference()
        if cache is not None and cache.layers[idx].watching:
            layer, cache.layers[idx].watching = cache.layers[idx], False
            query, layer.query = layer.query, None
            with torch.no_grad():
                query = _rotated(query, module_head_dim, *kwargs["position_embeddings"])
                layer.observe(query, scaling)

    module_head_dim, scaling = module.head_dim, module.scaling
    yield module.register_forward_pre_hook(before, with_kwargs=True)
    # Qwen3 norms its queries before it turns them.
    yield (module.q_norm if hasattr(module, "q_norm") else module.q_proj).register_forward_hook(on_query)
    yield module.register_forward_hook(after, with_kwargs=True)


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _rotated(query: Tensor, head_dim: int, cos: Tensor, sin: Tensor) -> Tensor:
    """`(batch, q_len, heads * head_dim)` or `(batch, q_len, heads, head_dim)` to rotated heads, tokens third."""
    heads = query.view(*query.shape[:2], -1, head_dim).transpose(1, 2)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _refuse_mask(mask: object, layer: WatchedLayer, q_len: int) -> None:
    """Refuse every mask but the causal one: positions in the cache no longer tell which column was a padding."""
    if mask is None:
        return
    kept = layer.kept_before(q_len)
    ok = isinstance(mask, Tensor)
    if ok and mask.ndim == 2:  # the form that flash attention takes: one number a token
        ok = bool(mask.bool().all())
    elif ok:
        causal = torch.ones(q_len, kept + q_len, dtype=torch.bool, device=mask.device).tril(kept)
        seen = mask if mask.dtype == torch.bool else mask == 0
        ok = seen.shape[-2:] == causal.shape and bool((seen == causal).all())
    takes = "rows of equal length without padding, and a causal mask: which tokens stay differs by KV head"
    _check.require(ok, "attention_mask", "a mask with padding, or of a form of its own", takes)
