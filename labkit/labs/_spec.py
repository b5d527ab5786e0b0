"""What one lab is made of: its knobs, what it computes, how that is drawn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ipywidgets as widgets
import plotly.graph_objects as go
import torch

from labkit.labs._prediction import Prediction
from labkit.labs._result import Compute, LabResult


@dataclass(frozen=True)
class LabSpec:
    """One lab. `knobs`: at most three widgets with a `value`, by the name that `params` takes; `switches`: lesser ones.

    `params(**values)` gives the frozen dataclass that `compute` takes. `figure()` builds the empty figure once;
    `draw(figure, result, earlier)` sets its traces' data, `earlier` being the finished results before, oldest first.
    `device`: what is measured on, one lab at a time; None where nothing is timed, so that nobody need wait.
    """

    name: str
    title: str
    how: str
    knobs: Mapping[str, widgets.ValueWidget]
    params: Callable[..., object]
    compute: Compute
    figure: Callable[[], go.Figure]
    draw: Callable[[go.Figure, LabResult, Sequence[LabResult]], None]
    device: torch.device | None
    prediction: Prediction | None = None
    switches: Mapping[str, widgets.ValueWidget] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= len(self.knobs) <= 3:
            raise ValueError(f"knobs: got {list(self.knobs)}; takes one to three")

    @property
    def controls(self) -> dict[str, widgets.ValueWidget]:
        """Knobs and switches, by name."""
        return {**self.knobs, **self.switches}
