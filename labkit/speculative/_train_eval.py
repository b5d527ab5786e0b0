"""How well a head drafts for its target, on prompts that nothing was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit import _check
from labkit._table import Table
from labkit.engine.decode import Decoder
from labkit.models import LoadedModel
from labkit.speculative.decode import generate
from labkit.speculative.interface import Proposer
from labkit.speculative.prompts import load_prompts, prompt_ids
from labkit.speculative.stats import Call, SpeculativeStats


@dataclass(frozen=True)
class HeldOut:
    """What a proposer reached over the held-out prompts of one kind, greedy. kept[i]: of the drafts whose first i
    tokens were kept, the share whose next one was too."""

    kind: str
    prompts: int
    num_assistant_tokens: int
    max_new_tokens: int
    acceptance_rate: float
    tokens_per_target_call: float
    kept: tuple[float, ...]


def evaluate(
    target: LoadedModel | Decoder,
    proposer: Proposer,
    tokenizer: object,
    kind: str = "chat",
    *,
    num_assistant_tokens: int = 4,
    max_new_tokens: int = 96,
    prompts: Sequence[str] | None = None,
) -> HeldOut:
    """Draft for `target` over `prompts`, by default all held-out ones of `kind`, and count. Errors: as `generate`."""
    gamma = _check.integer("num_assistant_tokens", num_assistant_tokens, 1)
    decoder = target if isinstance(target, Decoder) else Decoder(target)
    texts = load_prompts(kind) if prompts is None else prompts
    total, reached, kept = SpeculativeStats(), [0] * gamma, [0] * gamma

    def count(call: Call) -> None:
        refused = call.kind == "residual"
        for place in range(min(call.n_accepted + refused, gamma)):
            reached[place] += 1
            kept[place] += place < call.n_accepted

    for text in texts:
        output = generate(
            decoder,
            prompt_ids(tokenizer, text),
            proposer,
            max_new_tokens=max_new_tokens,
            num_assistant_tokens=gamma,
            eos_token_id=tokenizer.eos_token_id,
            watch=count,
        )
        total += output.stats
    shares = tuple(k / r if r else float("nan") for k, r in zip(kept, reached, strict=True))
    rates = total.acceptance_rate, total.tokens_per_target_call
    return HeldOut(kind, len(texts), gamma, max_new_tokens, *rates, shares)


def held_out_table(runs: Sequence[HeldOut]) -> Table:
    """A row a run."""
    rows = tuple(
        (
            run.kind,
            str(run.prompts),
            str(run.num_assistant_tokens),
            f"{run.acceptance_rate:.3f}",
            f"{run.tokens_per_target_call:.2f}",
            ", ".join(f"{share:.2f}" for share in run.kept),
        )
        for run in runs
    )
    return Table(("prompts", "number", "drafted a call", "acceptance", "tokens a target call", "kept, by place"), rows)
