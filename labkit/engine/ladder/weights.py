"""The weights that the rungs run on: each form made once, sharing with the others whatever it does not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from labkit import _check
from labkit.models import LoadedModel, plain_model, shared_copy
from labkit.quantization import AWQConfig, GPTQConfig, QuantLinear, RTNConfig, quantize_
from labkit.quantization.rtn import round_to_nearest

WeightConfig = RTNConfig | GPTQConfig | AWQConfig

_HEAD_BITS, _GROUP = 8, 64


class WeightForm(NamedTuple):
    """Activations in `dtype`, matrices at `bits` (None: in `dtype`), the head at 8 bits or as it was."""

    dtype: torch.dtype
    bits: int | None = None
    packed_head: bool = False

    @classmethod
    def of(cls, rungs: Iterable[str], dtype: torch.dtype) -> WeightForm:
        """As `rungs` want them; `dtype` is the model's own."""
        on = set(rungs)
        bits = 4 if "int4" in on else 8 if "int8" in on else None
        return cls(torch.bfloat16 if "bfloat16" in on else dtype, bits, "int8_head" in on)


def _fitting_group(columns: int) -> int:
    """Groups of 64 where they divide a row; else the row."""
    return _GROUP if columns % _GROUP == 0 else -1


class StackModels:
    """A model as it was loaded, and its other forms: in 16 bits, at 8 or 4 bits, with a head at 8.

    configs: how the matrices come to 8 and to 4 bits, by bits; rounded to nearest in groups of 64 where nothing is
    said. calibration: token ids `(n_samples, seq_len)` for methods that need them. The model itself is left as it is.
    """

    def __init__(
        self,
        model: LoadedModel | PreTrainedModel,
        *,
        configs: Mapping[int, WeightConfig] | None = None,
        calibration: torch.Tensor | None = None,
    ) -> None:
        self.loaded = plain_model(model)
        takes = "a transformers causal LM, or a LoadedModel, not quantized yet"
        whole = isinstance(self.loaded, PreTrainedModel)
        packed = whole and any(getattr(module, "is_quantized", False) for module in self.loaded.modules())
        _check.require(whole and not packed, "model", type(self.loaded).__name__, takes)
        self.name = getattr(model, "name", None) or self.loaded.config.name_or_path or type(self.loaded).__name__
        for bits, config in (configs or {}).items():
            _check.choice("configs", bits, (8, 4))
            _check.require(config.bits == bits, f"configs[{bits}]", f"a config of {config.bits} bits", f"{bits} bits")
        self._configs, self._calibration = dict(configs or {}), calibration
        self._made: dict[WeightForm, PreTrainedModel] = {}

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    def config(self, bits: int) -> WeightConfig:
        """How the matrices come to `bits`."""
        rows = min(module.in_features for module in self.loaded.modules() if isinstance(module, torch.nn.Linear))
        return self._configs.get(bits) or RTNConfig(bits=bits, group_size=_fitting_group(rows))

    def has(self, form: WeightForm) -> bool:
        """Whether this form is there already; making one can take a while."""
        return form in self._made

    def model(self, form: WeightForm) -> PreTrainedModel:
        """The model in `form`. Its attention is `transformers`' fused one until told otherwise."""
        if form not in self._made:
            self._made[form] = self._make(*form)
        return self._made[form]

    @torch.no_grad()
    def _make(self, dtype: torch.dtype, bits: int | None, packed_head: bool) -> PreTrainedModel:
        if packed_head:
            model = shared_copy(self.model(WeightForm(dtype, bits)))
            head = model.lm_head
            grid = RTNConfig(bits=_HEAD_BITS, group_size=_fitting_group(head.in_features))
            model.lm_head = QuantLinear(round_to_nearest(head.weight, grid), head.bias, dtype=dtype)
            return model
        model = shared_copy(self.loaded).eval()  # dropout would make another text each time
        if bits is not None:
            # From the weights as they were loaded: what is rounded to 16 bits first is rounded twice.
            config = self.config(bits)
            calibration = None if isinstance(config, RTNConfig) else self._calibration
            quantize_(model, config, calibration, progress=False)
        # A chat model's own settings, such as a penalty for repeating or an end of text, would make another output.
        model.generation_config = GenerationConfig()
        return model if model.dtype is dtype else model.to(dtype)
