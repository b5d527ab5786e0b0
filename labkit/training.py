"""A training loop for what follows a conversion (quantizing, merging heads): batches, a loss with a teacher, the
schedule, the optimizer."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

# Elements of float32 logits held at a time, as in labkit.quality.
_LOGITS_AT_ONCE = 1 << 24
_WARMUP_SHARE = 0.05


@dataclass
class TrainingState:
    """How far a training has come: the loss of each step done, and the seconds that those took."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def step(self) -> int:
        return len(self.losses)


def learning_rate_share(step: int, steps: int) -> float:
    """Of the full rate, at `step` (from 0): up in a straight line over a twentieth of all, then a half cosine to 0."""
    warmup = max(1, round(_WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def batch_indices(step: int, n_samples: int, batch_size: int, seed: int) -> list[int]:
    """Which samples step `step` (from 0) trains on: each once, in random order, before any comes again.

    A function of its arguments alone, so that a training that goes on does so where it stopped.
    """
    indices = []
    for index in range(step * batch_size, (step + 1) * batch_size):
        epoch, within = divmod(index, n_samples)
        order = torch.randperm(n_samples, generator=torch.Generator().manual_seed((seed + epoch) % 2**64))
        indices.append(int(order[within]))
    return indices


@contextlib.contextmanager
def computing_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Matrix products in bfloat16 where `dtype` is that: weights, norms and the residual stream stay what they are."""
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        yield


class Teacher:
    """What the float model says to each sample. Kept is its last hidden state, not its logits: a hundredth of them."""

    def __init__(self, model: PreTrainedModel, switch: Callable[[bool], None], dtype: torch.dtype) -> None:
        self._model, self._switch, self._dtype = model, switch, dtype
        self._hidden: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def hidden(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Of sample `index`, whose tokens are `ids (seq_len,)`: `(seq_len, hidden_size)`."""
        if index not in self._hidden:
            with self._teaching(), computing_in(self._dtype, self._model.device):
                out = self._model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            self._hidden[index] = out.to(self._dtype)
        return self._hidden[index]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden (rows, hidden_size)` to `(rows, vocab_size)`, float32."""
        with self._teaching(), computing_in(self._dtype, self._model.device):
            return self._model.get_output_embeddings()(hidden.to(self._model.dtype)).float()

    @contextlib.contextmanager
    def _teaching(self) -> Iterator[None]:
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)


@dataclass(frozen=True)
class Objective:
    """`distillation` times KL(teacher || model), the mean over all tokens (Hinton, Vinyals and Dean 2015), and one
    minus that times the cross-entropy of the next token. In nats. Products are computed in `dtype`."""

    model: PreTrainedModel
    distillation: float
    teacher: Teacher | None
    dtype: torch.dtype

    def backward(self, indices: Sequence[int], batch: torch.Tensor) -> float:
        """The loss of `batch (batch_size, seq_len)`, samples `indices`; its gradients are added to the parameters'."""
        taught = None
        if self.distillation:
            pairs = zip(indices, batch, strict=True)
            taught = torch.stack([self.teacher.hidden(index, ids) for index, ids in pairs]).flatten(0, 1)
        with computing_in(self.dtype, batch.device):
            hidden = self.model.base_model(input_ids=batch, use_cache=False).last_hidden_state
            # Cut off here: logits and their gradients are made a piece at a time and add up in the leaf.
            leaf = hidden.detach().requires_grad_()
            loss = self._of_logits(leaf, batch, taught)
        hidden.backward(leaf.grad)
        return loss

    def _of_logits(self, hidden: torch.Tensor, batch: torch.Tensor, taught: torch.Tensor | None) -> float:
        # The last token of a sample has no next one.
        targets = F.pad(batch[:, 1:], (0, 1), value=-100).flatten()
        counted = batch.shape[0] * (batch.shape[1] - 1)
        head, vocab = self.model.get_output_embeddings(), self.model.config.vocab_size
        total = 0.0
        for rows in torch.arange(len(targets)).split(max(1, _LOGITS_AT_ONCE // vocab)):
            piece = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = head(hidden.flatten(0, 1)[piece]).float()
            loss = logits.new_zeros(())
            if self.distillation:
                wanted = self.teacher.logits(taught[piece]).log_softmax(-1)
                divergence = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="sum")
                loss = loss + self.distillation / len(targets) * divergence
            if self.distillation < 1:
                entropy = F.cross_entropy(logits, targets[piece], reduction="sum")
                loss = loss + (1 - self.distillation) / counted * entropy
            loss.backward()
            total += loss.item()
        return total


@dataclass(frozen=True)
class Loop:
    """`steps` steps of Adam (Kingma and Ba 2015; no weight decay) over samples `ids (n_samples, seq_len)`.

    `groups`: parameters with their full learning rate. `save(state)` is called every `save_every` steps and at the
    end; `watch(step)` before the first step and after each, outside of the clock.
    """

    groups: Sequence[tuple[Sequence[nn.Parameter], float]]
    ids: torch.Tensor
    steps: int
    batch_size: int
    seed: int
    time_limit_s: float | None = None
    save_every: int = 100
    save: Callable[[TrainingState], None] = lambda _: None
    watch: Callable[[int], None] = lambda _: None

    def optimizer(self) -> torch.optim.Adam:
        groups = [{"params": list(parameters), "lr": rate} for parameters, rate in self.groups if parameters]
        return torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)

    def run(
        self, objective: Objective, optimizer: torch.optim.Adam, state: TrainingState, update: Callable[[int], None]
    ) -> None:
        """Train from where `state` stands, which is kept up; `update(done)` moves a progress bar.

        Errors: FloatingPointError for a loss that is no longer finite.
        """
        full = [group["lr"] for group in optimizer.param_groups]
        spent, saved = 0.0, state.step
        if not state.step:
            self.watch(0)
        while state.step < self.steps and (self.time_limit_s is None or spent < self.time_limit_s):
            begin = time.perf_counter()
            for group, rate in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = rate * learning_rate_share(state.step, self.steps)
            loss = self._step(objective, optimizer, state.step)
            seconds = time.perf_counter() - begin
            spent += seconds
            state.losses.append(loss)
            state.seconds += seconds
            update(state.step)
            if state.step % self.save_every == 0:
                self.save(state)
                saved = state.step
            self.watch(state.step)
        if saved != state.step:
            self.save(state)

    def _step(self, objective: Objective, optimizer: torch.optim.Adam, step: int) -> float:
        indices = batch_indices(step, len(self.ids), self.batch_size, self.seed)
        loss = objective.backward(indices, self.ids[indices])
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of step {step + 1} is {loss}: a lower learning_rate may help")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss
