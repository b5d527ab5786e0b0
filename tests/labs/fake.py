"""A small lab whose compute the tests hold in their hand: it counts calls, waits at a gate, and fails on demand."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import ipywidgets as widgets
import plotly.graph_objects as go
import torch

from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._result import Number, Progress
from labkit.labs._spec import LabSpec
from labkit.measure import Measurement

WAIT_S = 20.0


@dataclass(frozen=True)
class Params:
    size: int

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError("size: got <b>13</b>; takes any other number")


@dataclass(frozen=True)
class Result:
    params: Params
    area: int
    firm: bool = True

    def numbers(self) -> list[Number]:
        return [Number("area", "Area <i>", f"{self.area} m²", float(self.area), group="Square", note="size × size")]

    def text(self) -> str:
        return f"Square of {self.params.size}: {self.area} m²"

    def rows(self) -> list[dict[str, object]]:
        return [asdict(self.params) | {"area": self.area}]

    def measurements(self) -> list[Measurement]:
        return [Measurement.of("fake_lab.area", self.area, "m²", device="cpu", params=asdict(self.params))]


@dataclass
class FakeCompute:
    """Yields a partial and a final result; stands at `gate` in between, `started` is set when it gets there."""

    gate: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)
    calls: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    fail: dict[int, BaseException] = field(default_factory=dict)

    def __call__(self, params: Params, cancelled: Callable[[], bool]) -> Iterator[Progress | Result]:
        self.calls.append(params.size)
        yield Progress(f"Squaring {params.size}", 0.5)
        if params.size in self.fail:
            raise self.fail[params.size]
        yield Result(params, params.size, firm=False)
        self.started.set()
        # After a test that failed nobody opens the gate: this thread would hold the device for ever.
        for _ in range(_GATE_WAITS):
            if self.gate.wait(_GATE_WAIT_S) or cancelled():
                break
        if not self.gate.is_set():
            return
        self.completed.append(params.size)
        yield Result(params, params.size**2)


def draw(figure: go.Figure, result: Result, earlier: tuple[Result, ...]) -> None:
    figure.data[0].update(x=[r.params.size for r in earlier], y=[r.area for r in earlier])
    figure.data[1].update(x=[result.params.size], y=[result.area])


CPU = torch.device("cpu")
_GATE_WAIT_S, _GATE_WAITS = 0.01, 6000


def build(compute: FakeCompute, *, prediction: Prediction | None = None, device: torch.device | None = CPU) -> Lab:
    figure = go.Figure([go.Scatter(opacity=0.3, name="earlier"), go.Scatter(name="now")])
    return Lab(
        LabSpec(
            name="fake_lab",
            title="Squares",
            how="Move the size.",
            knobs={"size": widgets.IntSlider(value=2, min=1, max=20)},
            params=Params,
            compute=compute,
            figure=lambda: figure,
            draw=draw,
            device=device,
            prediction=prediction,
        )
    )


def move(lab: Lab, size: int) -> None:
    """Move the lab's knob and wait until it has measured."""
    lab.spec.knobs["size"].value = size
    assert lab.wait(WAIT_S)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)
