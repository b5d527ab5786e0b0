"""What `flash_attention_lab` measures: time and memory of each implementation, at a length and at all shorter ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from labkit.attention.implementations import attention_implementations
from labkit.hardware import Ceilings, describe, measure_ceilings
from labkit.labs import _flash_attention_steps as steps
from labkit.labs._flash_attention_costs import ROLES
from labkit.labs._flash_attention_result import FlashAttentionParams, FlashAttentionResult, Found
from labkit.labs._result import Progress
from labkit.measure import Timing

Cancelled = Callable[[], bool]
Steps = Iterator[Progress | FlashAttentionResult]

# Those that hold the matrix of scores are not run beside the rest where standard attention takes longer than this.
_WITH_MATRIX, _SLOW_S = ("sdpa math",), 0.5
# Its first call compiles for seconds, which no newer setting could cut short.
_COMPILED = {"FlexAttention": "installed; compiling it takes longer than a lab may: measure_attention() runs it"}
# Clocking goes on for about so long at the chosen length, and at each other.
_BUDGET_S, _BRIEF_S = 0.8, 0.25
_NAMES = {"standard": "standard attention", "native": "PyTorch's kernel", "own": "the course's own kernel"}


class FlashAttentionCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and FlashAttentionResult, each fuller than the
    one before: the quick ones' time, memory, all in turn, the roof, then the curve at shorter lengths.

    `lengths` are those that the lab offers. What was measured at one is kept, and not measured again for the curve of
    another; the chosen length always is.
    """

    def __init__(
        self,
        device: torch.device,
        lengths: tuple[int, ...],
        *,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._device, self._lengths = device, tuple(sorted(lengths))
        self._free_bytes = free_bytes or (lambda: describe(device).free_bytes)
        self._kept: dict[tuple[object, ...], Found] = {}
        self._ceilings: Ceilings | None = None

    def __call__(self, params: FlashAttentionParams, cancelled: Cancelled) -> Steps:
        found = FlashAttentionResult(params, str(self._device), self._free_bytes())
        for stage in (self._at, self._roof, self._shorter, self._others):
            for step in stage(found, cancelled):
                found = step if isinstance(step, FlashAttentionResult) else found
                yield step
            if cancelled():
                return

    def _at(self, found: FlashAttentionResult, cancelled: Cancelled) -> Steps:
        """Everything at the chosen length: a first time of the quick ones, memory, then all in turn."""
        params = found.params
        why_not = {role: steps.why_not(params, role, found.free_bytes, self._lengths) for role in ROLES}
        found = self._with(found, {role: Found(why_not=why) for role, why in why_not.items() if why})
        runs = [role for role in ROLES if not why_not[role]]
        ops = steps.make_ops(params, steps.make_inputs(params, self._device)) if runs else {}
        ops = {role: ops[role] for role in runs}
        outputs = {}
        for role in [role for role in ("native", "own") if role in ops]:
            yield Progress(f"Time of {_NAMES[role]}, {params.seq_len:,} tokens", 0.05 + 0.05 * len(outputs))
            if cancelled():
                return
            first = steps.try_once(ops[role], self._device)
            if isinstance(first, str):
                del ops[role]
                found = self._with(found, {role: Found(why_not=first)})
            else:
                outputs[role], seconds = first
                found = self._with(found, {role: Found(Timing.of([seconds]))})
            yield found
        if len(outputs) == 2:
            found = replace(found, difference=steps.largest_difference(*outputs.values()))
        outputs.clear()
        yield from self._memory_and_time(found, ops, cancelled)

    def _memory_and_time(self, found: FlashAttentionResult, ops: dict[str, steps.Op], cancelled: Cancelled) -> Steps:
        params = found.params
        for i, role in enumerate(("native", "standard", "own")):
            if role not in ops:
                continue
            yield Progress(f"Memory of {_NAMES[role]}", 0.15 + 0.05 * i)
            if cancelled():
                return
            found = self._with(found, {role: self._recorded(params, role, ops[role], found.of(role))})
            yield found
        yield Progress("Time of each, in turn", 0.3)
        times = steps.clock(ops, self._device, _BUDGET_S, cancelled) if ops else {}
        if times is not None:
            found = self._with(found, {role: replace(found.of(role), timing=timing) for role, timing in times.items()})
            self._keep(params, found.found)
            yield replace(found, curve={params.seq_len: found.found})

    def _recorded(self, params: FlashAttentionParams, role: str, op: steps.Op, found: Found) -> Found:
        """With its memory, or why that is not recorded."""
        why = steps.why_not_recorded(params, role)
        return replace(found, not_recorded=why) if why else replace(found, peak_bytes=steps.peak_of(op, self._device))

    def _roof(self, found: FlashAttentionResult, cancelled: Cancelled) -> Steps:
        if self._ceilings is None:
            yield Progress("Measuring this machine's ceilings (about 2 s, once)", 0.4)
            self._ceilings = measure_ceilings(self._device)
        yield replace(found, ceilings=self._ceilings)

    def _shorter(self, found: FlashAttentionResult, cancelled: Cancelled) -> Steps:
        """The curve: every shorter length, of each role that has not been measured there before."""
        curve = dict(found.curve)
        shorter = [n for n in self._lengths if n < found.params.seq_len]
        for i, n in enumerate(shorter):
            params = found.params.at(n)
            kept = {role: self._kept[key] for role in ROLES if (key := self._key(params, role)) in self._kept}
            missing = [role for role in ROLES if role not in kept]
            if missing:
                yield Progress(f"The same at {n:,} tokens, for the curve", 0.5 + 0.4 * i / len(shorter))
                if cancelled():
                    return
                measured = self._briefly(params, missing, found.free_bytes, cancelled)
                if measured is None:
                    return
                self._keep(params, measured)
                kept |= measured
            curve[n] = {role: kept[role] for role in ROLES}
            if missing:
                yield replace(found, curve=dict(sorted(curve.items())))
        yield replace(found, curve=dict(sorted(curve.items())))

    def _briefly(
        self, params: FlashAttentionParams, roles: list[str], free_bytes: int, cancelled: Cancelled
    ) -> dict[str, Found] | None:
        """Memory and time of these roles; None when cancelled."""
        why_not = {role: steps.why_not(params, role, free_bytes, self._lengths) for role in roles}
        ops = steps.make_ops(params, steps.make_inputs(params, self._device))
        measured = {role: Found(why_not=why) for role, why in why_not.items()}
        ops = {role: ops[role] for role in roles if not why_not[role]}
        for role, op in list(ops.items()):
            if cancelled():
                return None
            first = steps.try_once(op, self._device)
            if isinstance(first, str):
                del ops[role]
                measured[role] = Found(why_not=first)
            else:
                measured[role] = self._recorded(params, role, op, measured[role])
        times = steps.clock(ops, self._device, _BRIEF_S, cancelled) if ops else {}
        if times is None:
            return None
        return measured | {role: replace(measured[role], timing=timing) for role, timing in times.items()}

    def _others(self, found: FlashAttentionResult, cancelled: Cancelled) -> Steps:
        """What else is installed, at the chosen length; why the rest is not there."""
        params = found.params
        known = attention_implementations(self._device, getattr(torch, params.dtype), params.head_dim)
        known |= {name: why for name, why in _COMPILED.items() if known.get(name, "") is None}
        shown = {params.implementation(role) for role in ROLES}
        here = [name for name, why in known.items() if why is None and name not in shown]
        found = replace(found, absent={name: why for name, why in known.items() if why is not None})
        for i, name in enumerate(here):
            yield Progress(f"Also here: {name}", 0.92 + 0.07 * i / len(here))
            if cancelled():
                return
            found = replace(found, others={**found.others, name: self._other(found, name, cancelled)})
        yield found

    def _other(self, found: FlashAttentionResult, name: str, cancelled: Cancelled) -> Found:
        """Time and memory of one more implementation, where that takes no longer than a moment."""
        params = found.params
        if name in _WITH_MATRIX:
            why = steps.why_not(params, "standard", found.free_bytes, self._lengths)
            slow = (found.seconds("standard") or 0.0) > _SLOW_S
            why = why or (f"standard attention took more than {_SLOW_S:g} s here" if slow else "")
            if why:
                return Found(why_not=why)
        op = steps.make_op(name, params, steps.make_inputs(params, self._device))
        try:
            op()  # warms up
            peak = steps.peak_of(op, self._device)
            times = steps.clock({name: op}, self._device, _BRIEF_S, cancelled)
        except Exception as error:  # the others are still worth showing
            return Found(why_not=steps.failure(error, self._device))
        return Found(times[name] if times else None, peak)

    @staticmethod
    def _with(found: FlashAttentionResult, more: dict[str, Found]) -> FlashAttentionResult:
        return replace(found, found={**found.found, **more})

    @staticmethod
    def _key(params: FlashAttentionParams, role: str) -> tuple[object, ...]:
        """What this role's figures hang on: block sizes only where it has them."""
        return (role, replace(params, block_size=1) if role != "own" else params)

    def _keep(self, params: FlashAttentionParams, measured: dict[str, Found]) -> None:
        self._kept |= {self._key(params, role): found for role, found in measured.items() if found.timing}
