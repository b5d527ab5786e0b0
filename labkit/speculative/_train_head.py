"""A head made and trained from its target's answers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import progress
from labkit.models import LoadedModel
from labkit.speculative import _train_state
from labkit.speculative._train_data import Sample
from labkit.speculative._train_loss import EagleObjective, draft_vocabulary, in_batches
from labkit.speculative._train_prompts import ChatTemplate
from labkit.speculative._train_state import Checked, HeadTraining
from labkit.speculative.eagle_model import EagleConfig, EagleModel
from labkit.training import Loop, TrainingState

# Answers shorter than this teach next to nothing for the padding that they cost.
_LEAST_ANSWER = 8
_APART = 48
_CHECKED_STEPS = 4


@dataclass(frozen=True)
class HeadTrainingConfig:
    """draft_vocab_size: tokens that the head drafts from. steps of `batch_size` answers each; the learning rate falls
    to 0 over them. unroll: tokens of each draft that the last `unrolled_share` of the steps train on; before, the first
    token alone, at a third of the cost. check_every: steps between looks at answers that are kept apart."""

    draft_vocab_size: int = 8192
    unroll: int = 3
    unrolled_share: float = 0.4
    steps: int = 6000
    batch_size: int = 4
    learning_rate: float = 1e-3
    check_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("draft_vocab_size", "unroll", "steps", "batch_size", "check_every"):
            _check.integer(name, getattr(self, name), 1)
        _check.number("unrolled_share", self.unrolled_share, 0.0, 1.0)
        _check.number("learning_rate", self.learning_rate, 0.0, 1.0)
        _check.seed("seed", self.seed)


def train_head(
    target: LoadedModel, samples: Sequence[Sample], config: HeadTrainingConfig, state_path: Path
) -> tuple[EagleModel, HeadTraining, float]:
    """A head for `target`, its training, and the share of the answers' tokens that its vocabulary holds.

    Saved to `state_path` as it goes; where that exists, it goes on from there. Errors: ValueError for too few samples,
    and for a state of another training.
    """
    samples = [sample for sample in samples if len(sample.tokens) - sample.prompt >= _LEAST_ANSWER]
    _check.require(len(samples) >= 2 * _APART, "samples", f"{len(samples)} answers", f"at least {2 * _APART}")
    random.Random(config.seed).shuffle(samples)
    apart, taught = samples[:_APART], samples[_APART:]
    plain = target.model
    ids, share = draft_vocabulary(taught, plain.config.vocab_size, config.draft_vocab_size)
    model = new_head(target, ids, apart, config.seed)
    opening = len(ChatTemplate(target.tokenizer).before)
    objective = EagleObjective(model, plain, in_batches(taught, config.batch_size), template_tokens=opening)
    look = EagleObjective(model, plain, in_batches(apart, 16), from_answer=True)
    loop, optimizer, training = _loop(model, objective, look, config, state_path, _digest(samples))
    with progress("training the head", config.steps, "steps") as update:
        loop.run(_Scheduled(objective, config, training.state), optimizer, training.state, update)
    return model.eval().requires_grad_(False), training, share


@dataclass(frozen=True)
class _Scheduled:
    """The objective as the loop calls it: drafts of one token at first, of `unroll` later."""

    objective: EagleObjective
    config: HeadTrainingConfig
    state: TrainingState

    def backward(self, indices: Sequence[int], _: torch.Tensor) -> float:
        """The loss of the batch `indices[0]`; a sample of the loop is a whole batch of ours."""
        late = self.state.step >= (1 - self.config.unrolled_share) * self.config.steps
        return self.objective.backward(indices[0], self.config.unroll if late else 1)


def _loop(
    model: EagleModel,
    objective: EagleObjective,
    look: EagleObjective,
    config: HeadTrainingConfig,
    state_path: Path,
    data: str,
) -> tuple[Loop, torch.optim.Adam, HeadTraining]:
    """The loop over batches, its optimizer, and the training as far as it had come."""
    identity = asdict(config) | {"target": model.config.target, "data": data}

    def watch(step: int) -> None:
        if step and (step % config.check_every == 0 or step == config.steps):
            training.checked.append(Checked(step, look.matches(_CHECKED_STEPS)))
            # Here, and not as the loop saves: a look that was made must not be missing from what is saved.
            _train_state.save(state_path, model, optimizer, training, identity)

    batches = torch.arange(len(objective.batches))
    groups = [(list(model.parameters()), config.learning_rate)]
    loop = Loop(groups, batches, config.steps, 1, config.seed, watch=watch)
    optimizer = loop.optimizer()
    training = _train_state.resume(state_path, model, optimizer, identity)
    return loop, optimizer, training


def new_head(target: LoadedModel, draft_ids: torch.Tensor, samples: Sequence[Sample], seed: int) -> EagleModel:
    """A head before training. Its matrices are random at the scale that keeps a signal's size; its norms even out the
    channels of what they read, of which a few are ten times as large as the others, and give its output the spread of
    the target's hidden states. Measured on smollm2-135m: after 80 steps twice the matches of a start from the target's
    last layer and from norms of 1."""
    plain = target.model
    model = EagleModel(_head_config(target.name, plain, len(draft_ids)), draft_ids)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.cat([sample.hidden.float() for sample in samples])
    embedding = plain.get_input_embeddings().weight[draft_ids].float().cpu()
    with torch.no_grad():
        for module in model.children():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5, generator=generator)
        # Half of the usual: what the layer adds begins smaller than what it is added to.
        for module in (model.o_proj, model.down_proj):
            module.weight.mul_(0.5)
        for norm, seen in ((model.feature_norm, hidden), (model.embed_norm, embedding)):
            norm.weight.copy_(seen.square().mean().sqrt() / seen.std(0))
        model.norm.weight.copy_(hidden.std(0))
    return model.to(plain.device)


def _head_config(name: str, target: PreTrainedModel, draft_vocab_size: int) -> EagleConfig:
    config = target.config
    heads = config.num_attention_heads
    return EagleConfig(
        target=name,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        draft_vocab_size=draft_vocab_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        max_position_embeddings=config.max_position_embeddings,
    )


def _digest(samples: Sequence[Sample]) -> str:
    """Tells one set of answers from another."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens.numpy().tobytes())
    return digest.hexdigest()[:16]
