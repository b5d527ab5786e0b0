"""The model of `stack_lab` in all its forms, what drafts for it, and the stacks made of them. No widgets here."""

from __future__ import annotations

import torch

from labkit.engine.ladder import Stack, StackModels, refusals
from labkit.labs._quantization_models import load_once
from labkit.labs._stack_text import Texts, read_texts
from labkit.models import LoadedModel
from labkit.speculative.interface import Proposer
from labkit.speculative.prompt_lookup import PromptLookup

# The model that the course's trained head drafts for.
HEADED = "smollm2-135m"


def default_dtype(given: str | LoadedModel, device: torch.device) -> torch.dtype:
    """Of the model as it is, or as `load_model` would bring it."""
    if isinstance(given, LoadedModel):
        return given.model.dtype
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class Stacks:
    """One model, its forms, its texts and its proposer, each made when it is first asked for."""

    def __init__(self, given: str | LoadedModel, device: torch.device, texts: Texts | None = None) -> None:
        self.given, self.device = given, device
        self.dtype = default_dtype(given, device)
        self._models: StackModels | None = None
        self._loaded: LoadedModel | None = None
        self._texts = texts
        self._proposer: Proposer | None = None
        self._latest: tuple[object, Stack] | None = None
        self._baseline: Stack | None = None

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            self._loaded = load_once(self.given, self.device) if isinstance(self.given, str) else self.given
        return self._loaded

    @property
    def ready(self) -> bool:
        """Whether the model is there."""
        return self._models is not None

    @property
    def models(self) -> StackModels:
        if self._models is None:
            self._models = StackModels(self.loaded)
        return self._models

    @property
    def texts(self) -> Texts:
        if self._texts is None:
            self._texts = read_texts(self.loaded)
        return self._texts

    def refused(self, rungs: tuple[str, ...]) -> dict[str, str]:
        """Those that do not go with the ones before them; known before a model is loaded."""
        return refusals(rungs, device=self.device, dtype=self.dtype)

    @property
    def proposer_name(self) -> str:
        name = self.given if isinstance(self.given, str) else self.given.name
        return "EAGLE head" if name == HEADED else "prompt lookup"

    @property
    def proposer(self) -> Proposer:
        """The course's head for the model that it was trained for, else lookup in the prompt."""
        if self._proposer is None:
            from labkit.speculative.eagle import EagleHead

            self._proposer = PromptLookup() if self.proposer_name == "prompt lookup" else EagleHead.load()
        return self._proposer

    @property
    def baseline(self) -> Stack:
        """No rung."""
        if self._baseline is None:
            self._baseline = Stack(self.models)
        return self._baseline

    def stack(self, on: tuple[str, ...], gamma: int) -> Stack:
        """Of these rungs. The latest is kept, with its cache; an earlier one's goes, its weights stay."""
        key = (on, gamma if "speculation" in on else 0)
        if self._latest is None or self._latest[0] != key:
            proposer = self.proposer if "speculation" in on else None
            stack = Stack(self.models, on, proposer=proposer, num_assistant_tokens=gamma) if on else self.baseline
            self._latest = (key, stack)
        return self._latest[1]
