"""Lets a cache see the queries and the mask: hooks on a model's attention that act for that one cache."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit import _check
from labkit.kv_cache.evicting import EvictingCache, EvictingLayer, checked_shape
from labkit.models import LoadedModel, plain_model


class WatchedLayer(EvictingLayer):
    """A layer whose `observe` gets each step's queries after `update` has taken the step's keys and values."""

    def __init__(self) -> None:
        super().__init__()
        # The thread whose call of the attention module is under way: others may run the same model with another cache.
        self.watching: int | None = None
        self.query: Tensor | None = None

    @property
    def watched(self) -> bool:
        """Whether this thread is inside the attention module, called with this layer's cache."""
        return self.watching == threading.get_ident()

    def require_watched(self) -> None:
        """Refuse an `update` that does not come from the attention module with the hooks."""
        takes = "the model that the cache was made with, called as transformers calls it"
        _check.require(self.watched, "past_key_values", f"a {type(self).__name__} in another model", takes)

    def reset(self) -> None:
        super().reset()
        self.watching = self.query = None

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

    def __getstate__(self) -> object:
        raise NotImplementedError(
            f"a {type(self).__name__} hangs on its model by hooks, so that it is not pickled or copied in part: "
            f"use copy.deepcopy, within one process"
        )

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
    model = plain_model(model)
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
    idx, own, source = module.layer_idx, weakref.ref(module), weakref.ref(_query_source(module))

    def before(called: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        cache = reference()
        if cache is not None:
            layer = cache.layers[idx]
            # A deep copy of the model takes the hooks along; it is another model all the same.
            mine = kwargs.get("past_key_values") is cache and called is own()
            if mine or layer.watched:  # the latter where an earlier call did not come to its end
                layer.watching = threading.get_ident() if mine else None
            if mine:
                takes = "the model as it was when the cache was made: make a new cache after quantizing or merging it"
                _check.require(_query_source(called) is source(), "past_key_values", "a model changed since", takes)
            if mine and idx == 0:
                _refuse_mask(kwargs.get("attention_mask"), layer, kwargs["hidden_states"].shape[1])

    def on_query(_: nn.Module, args: tuple, output: Tensor) -> None:
        cache = reference()
        if cache is not None and cache.layers[idx].watched:
            cache.layers[idx].query = output.detach()

    def after(_: nn.Module, args: tuple, kwargs: dict[str, object], output: object) -> None:
        cache = reference()
        if cache is not None and cache.layers[idx].watched:
            layer, cache.layers[idx].watching = cache.layers[idx], None
            query, layer.query = layer.query, None
            with torch.no_grad():
                query = _rotated(query, module_head_dim, *kwargs["position_embeddings"])
                layer.observe(query, scaling)

    module_head_dim, scaling = module.head_dim, module.scaling
    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield source().register_forward_hook(on_query)
    yield module.register_forward_hook(after, with_kwargs=True)


def _query_source(attention: nn.Module) -> nn.Module:
    """What gives the queries as they are turned: Qwen3 norms them before."""
    return attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj


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
