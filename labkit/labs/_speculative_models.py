"""The targets and the proposers of `speculative_lab`, each made once. No widgets here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from labkit.engine.decode import Decoder
from labkit.labs._quantization_models import LEFT_ALONE, Models, fitting_group_sizes, load_once
from labkit.labs._quantization_result import QuantizationParams
from labkit.labs._speculative_result import EAGLE, ITSELF, LOOKUP, PACKED, PROPOSERS, SpeculativeParams
from labkit.models import LoadedModel
from labkit.quantization.plan import plan
from labkit.speculative.interface import Proposer
from labkit.speculative.tree import DraftTree

_BITS, _GROUP = 4, 64
# The likeliest two first tokens, and more after the likelier: seven nodes, whose pass costs little more than a chain's.
_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))


def draft_tree(depth: int) -> DraftTree:
    """The tree that the lab drafts, grown as a chain where it is to be deeper."""
    deeper = [(0,) * level for level in range(5, depth + 1)]
    return DraftTree.of_ranks([path for path in (*_TREE, *deeper) if len(path) <= depth])


class Targets:
    """The model as it was loaded and its int4 copy, each behind one Decoder; what drafts for them."""

    def __init__(self, given: str | LoadedModel, device: torch.device, head: str | Path | None = None) -> None:
        self._given, self._device, self._head = given, device, head
        self._loaded: LoadedModel | None = None
        self._packed: PreTrainedModel | None = None
        self._decoders: dict[str, Decoder] = {}
        self._proposers: dict[tuple[object, ...], Proposer] = {}

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            named = isinstance(self._given, str)
            self._loaded = load_once(self._given, self._device) if named else self._given
        return self._loaded

    def has(self, weights: str) -> bool:
        """Whether this target stands already; making one takes a second."""
        return weights in self._decoders

    def decoder(self, weights: str) -> Decoder:
        """The target that verifies."""
        if weights not in self._decoders:
            self._decoders[weights] = Decoder(self.packed if weights == PACKED else self.loaded.model)
        return self._decoders[weights]

    @property
    def packed(self) -> PreTrainedModel:
        """Rounded to nearest, as `quantization_lab` decodes it."""
        if self._packed is None:
            linears = plan(self.loaded.model, LEFT_ALONE).linears.values()
            sizes = fitting_group_sizes({linear.in_features for linear in linears})
            group = _GROUP if _GROUP in sizes else sizes[-1]
            models = Models(self.loaded)
            self._packed = models.decoding(models.pack(QuantizationParams(_BITS, group, "RTN", self.loaded.name)))
        return self._packed

    def proposer(self, params: SpeculativeParams) -> Proposer:
        """What drafts at this setting. Errors: ValueError where it cannot be had, naming those that can."""
        key = (params.proposer, params.weights if params.proposer == EAGLE else "", self._tree(params))
        if key not in self._proposers:
            try:
                self._proposers[key] = self._make(params)
            except Exception as error:  # a missing or damaged file, a draft that does not go with the target
                why = (str(error).splitlines() or [type(error).__name__])[0]
                others = " or ".join(name for name in PROPOSERS if name != params.proposer)
                takes = f"until it can, {others}"
                raise ValueError(
                    f"proposer: got {params.proposer!r}, which cannot draft here ({why}); takes {takes}"
                ) from error
        return self._proposers[key]

    def _tree(self, params: SpeculativeParams) -> DraftTree | None:
        return draft_tree(params.num_assistant_tokens) if params.tree and params.num_assistant_tokens else None

    def _make(self, params: SpeculativeParams) -> Proposer:
        makers: Mapping[str, object] = {EAGLE: self._eagle, LOOKUP: self._lookup, ITSELF: self._itself}
        return makers[params.proposer](params)

    def _eagle(self, params: SpeculativeParams) -> Proposer:
        from labkit.speculative.eagle import EagleHead

        return EagleHead.load(self._head, tree=self._tree(params))

    def _lookup(self, params: SpeculativeParams) -> Proposer:
        from labkit.speculative.prompt_lookup import PromptLookup

        return PromptLookup()

    def _itself(self, params: SpeculativeParams) -> Proposer:
        """The int4 copy with a cache of its own: of an int4 target the very same model."""
        from labkit.speculative.draft_model import DraftModel

        return DraftModel(self.packed)
