"""Speculative decoding at Llama-3.1-8B's shape with a draft model of Llama-3.2-1B's: the measured speed-up beside the
model's E / (γc + v), where a set part of the drafted tokens is right.

Random weights continue a text by near-ties, which a pass over several tokens may round otherwise than a pass over one,
and two random models agree about nothing. Both are therefore made sure of the same next token; their layers are read
and computed as before. So the draft model drafts in earnest and is always right, and each token that it drafted is
spoiled with probability 1 - α.
"""

import statistics
import time
from dataclasses import dataclass

from labkit.cli.gpu_sections import Recorder

# So many times larger than what random layers add to it, the token's embedding decides what comes out.
_EMBEDDING_STD = 64.0
# More than any row holds, prompt and all.
_MOST_TOKENS = 512
# How far the measured speed-up may be from the model's.
_WITHIN = 0.15
# Seconds after which no further round is begun: what is recorded is better than what is cut off.
_LAST_START_S = 30.0


@dataclass(frozen=True)
class _Sizes:
    """Prompt and new tokens, and what measuring the costs adds to half of them, stay in one bucket of a CUDA graph, 256
    slots."""

    prompt: int = 64
    new_tokens: int = 160
    rounds: int = 3
    alphas: tuple[float, ...] = (0.6, 0.8)
    gammas: tuple[int, ...] = (2, 4, 8)
    min_run_s: float = 0.2


_TINY = _Sizes(prompt=8, new_tokens=24, rounds=1, min_run_s=0.0)


class _Forced:
    """A real draft model's drafts, spoiled at each position with probability 1 - `alpha`, drawn independently."""

    wants_hidden = False

    def __init__(self, draft: object, alpha: float, seed: int) -> None:
        import torch

        draws = torch.rand(_MOST_TOKENS, generator=torch.Generator().manual_seed(seed))
        self.draft, self.spoiled = draft, (draws >= alpha).long()

    def begin(self, target: object, input_ids: object, sampling: object, generator: object) -> None:
        self.vocab_size, self.spoiled = target.model.config.vocab_size, self.spoiled.to(input_ids.device)
        self.draft.begin(target, input_ids, sampling, generator)

    def propose(self, rows: list[list[int]], n: int) -> object:
        from labkit.speculative import Proposal

        (row,), drafted = rows, self.draft.propose(rows, n).tokens
        spoiled = self.spoiled[len(row) : len(row) + drafted.shape[1]]
        return Proposal((drafted + spoiled) % self.vocab_size)

    def observe(self, hidden: object, kept: list[int]) -> None:
        """A draft model asks for no hidden states."""


@dataclass(frozen=True)
class _Setup:
    """Target and draft, and the target's own continuation of the prompt, `(1, prompt + new tokens)`, and beyond."""

    target: object
    draft: object
    prompt: object
    continuation: object
    new_tokens: int

    def forced(self, alpha: float, seed: int) -> _Forced:
        return _Forced(self.draft, alpha, seed)

    def generate(self, alpha: float, gamma: int, seed: int, new_tokens: int | None = None) -> object:
        """One speculative generation. Errors: RuntimeError if it is not the target's own continuation."""
        import torch

        from labkit.speculative import generate

        asked = {"max_new_tokens": new_tokens or self.new_tokens, "num_assistant_tokens": gamma}
        output = generate(self.target, self.prompt, self.forced(alpha, seed), **asked)
        expected = self.continuation[:, : output.sequences.shape[1]]
        if not torch.equal(output.sequences, expected):
            differ = int((output.sequences != expected).sum())
            raise RuntimeError(f"γ = {gamma}: {differ} of {asked['max_new_tokens']} tokens are not plain decoding's")
        return output


def speculative(recorder: Recorder) -> None:
    """Draft and verify costs, then plain and speculative decoding in turns, and the speed-ups beside the model's."""
    begin = time.monotonic()
    sizes = _TINY if recorder.tiny else _Sizes()
    setup = _set_up(recorder, sizes)
    _warm_up(setup, max(sizes.gammas))
    costs = _record_costs(recorder, setup, sizes)
    plain: list[float] = []
    runs: dict[tuple[float, int], list] = {(alpha, gamma): [] for alpha in sizes.alphas for gamma in sizes.gammas}
    for turn in range(sizes.rounds):
        if turn and time.monotonic() - begin > _LAST_START_S:
            recorder.record("left out: no time", f"rounds from {turn + 1} on")
            break
        for alpha in sizes.alphas:
            plain.append(setup.target.generate(setup.prompt, max_new_tokens=sizes.new_tokens).tpot_s)
            for gamma in sizes.gammas:
                runs[alpha, gamma].append(setup.generate(alpha, gamma, seed=turn))
        recorder.record("plain tokens per second", [round(1 / seconds, 2) for seconds in plain])
        found = {key: _beside_the_model(runs[key], key[1], plain, costs[key[1]]) for key in runs}
        recorder.record("speed-ups", {_label(*key): found[key] for key in found})
    for key, row in found.items():
        agreement = 1 - abs(row["measured"] / row["modelled"] - 1)
        recorder.target(f"measured speed-up beside the model's, {_label(*key)}", agreement, at_least=1 - _WITHIN)


def forced_drafts(draft: object, alpha: float, seed: int = 0) -> _Forced:
    """What `draft`, a model that is `made_sure`, says, right with probability `alpha` for a target that is too."""
    from labkit.engine import Decoder
    from labkit.speculative import DraftModel

    return _Forced(DraftModel(Decoder(draft)), alpha, seed)


def _label(alpha: float, gamma: int) -> str:
    return f"α {alpha:g}, γ {gamma}"


def _set_up(recorder: Recorder, sizes: _Sizes) -> _Setup:
    """The models, and what the target continues the prompt with, token by token."""
    import torch

    from labkit.engine import Decoder
    from labkit.models import shaped_model, tiny_model
    from labkit.speculative import DraftModel

    names = ("llama-3.1-8b", "llama-3.2-1b")
    if recorder.tiny:
        models, names = [tiny_model(), tiny_model(num_hidden_layers=1)], ("tiny", "tiny, one layer")
    else:
        models = [shaped_model(name, torch.bfloat16, recorder.device) for name in names]
    recorder.record("models", {"target": names[0], "draft": names[1], "dtype": str(models[0].dtype), "batch": 1})
    target, draft = (Decoder(made_sure(model)) for model in models)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.model.config.vocab_size, (1, sizes.prompt), generator=generator).to(recorder.device)
    known = target.generate(prompt, max_new_tokens=sizes.new_tokens + max(sizes.gammas)).sequences
    return _Setup(target, DraftModel(draft), prompt, known, sizes.new_tokens)


def made_sure(model: object) -> object:
    """The model, in place, so that each id is followed by the next one by a margin that no rounding reaches: the head's
    row of an id is the embedding of the id before it, and the embeddings outweigh what the layers add to them."""
    import torch

    embedding = model.model.embed_tokens.weight
    # Of its own, where the model ties the two: a step then reads as many bytes as before.
    model.lm_head.weight = torch.nn.Parameter(embedding.roll(1, dims=0), requires_grad=False)
    with torch.no_grad():
        embedding.mul_(_EMBEDDING_STD / model.config.initializer_range)
    return model


def _warm_up(setup: _Setup, most: int) -> None:
    """Every length that a verifying step can have, or a graph would be captured while the clock runs."""
    for gamma in range(1, most + 1):
        setup.generate(1.0, gamma, seed=0, new_tokens=2 * (gamma + 1))


def _record_costs(recorder: Recorder, setup: _Setup, sizes: _Sizes) -> dict[int, object]:
    """By γ, at the length that a run has on average."""
    from labkit.speculative.costs import measure_costs

    at = setup.continuation[:, : sizes.prompt + sizes.new_tokens // 2]
    costs = {}
    for gamma in sizes.gammas:
        found = costs[gamma] = measure_costs(setup.target, setup.forced(1.0, 0), at, gamma, min_run_s=sizes.min_run_s)
        seconds = {"plain step": found.step_s, "verify": found.verify_s, "draft": found.draft_s, "rest": found.rest_s}
        row = {f"{name}, microseconds": round(1e6 * value, 1) for name, value in seconds.items()}
        row |= {"draft cost c": round(found.draft_cost, 4), "verify cost v": round(found.verify_cost, 4)}
        recorder.record(f"costs, γ {gamma}", row)
    return costs


def _beside_the_model(runs: list, gamma: int, plain: list[float], costs: object) -> dict[str, float]:
    """What was accepted, over all runs; the speed-up, of medians; and the model's at that acceptance."""
    from labkit.speculative import expected_speedup

    stats = sum((run.stats for run in runs[1:]), start=runs[0].stats)
    tpot = statistics.median(run.tpot_s for run in runs)
    modelled = expected_speedup(stats.acceptance_rate, gamma, costs.draft_cost, costs.verify_cost)
    figures = {
        "acceptance": stats.acceptance_rate,
        "tokens per target call": stats.tokens_per_target_call,
        "tokens per second": 1 / tpot,
        "measured": statistics.median(plain) / tpot,
        "modelled": modelled,
    }
    return {name: round(value, 4) for name, value in figures.items()}
