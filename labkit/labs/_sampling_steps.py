"""The steps that `sampling_lab` runs: the next token's distribution, and a generation whose every draw is looked at.
No widgets here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.engine.decode import Decoder
from labkit.engine.sampling import most_likely, seeded_generator
from labkit.labs._sampling_result import DRAFTED, Likely, NextToken, SamplingParams
from labkit.speculative.acceptance import acceptance
from labkit.speculative.interface import Proposal, Proposer, Sampling
from labkit.speculative.loop import SpeculativeLoop
from labkit.speculative.stats import Call

# So many tokens stand by themselves, the rest together.
SHOWN = 12


def next_token(logits: Tensor, sampling: Sampling, decode: Callable[[int], str]) -> NextToken:
    """What `sampling` makes of `logits (vocab,)`, through the function that generation draws by."""
    own, uncut = Sampling(1.0).probabilities(logits), Sampling(sampling.temperature).probabilities(logits)
    by_top_k = Sampling(sampling.temperature, sampling.top_k).probabilities(logits)
    drawn = sampling.probabilities(logits)
    gone = {"temperature": uncut == 0, "top_k": by_top_k == 0, "top_p": drawn == 0}
    # Equal ones by their place, as an argmax has them.
    order = logits.float().sort(descending=True, stable=True).indices
    first, rest = order[:SHOWN], order[SHOWN:]
    likeliest = tuple(
        Likely(decode(token), *(float(p[token]) for p in (own, uncut, drawn)), _who(gone, token))
        for token in first.tolist()
    )
    lost_to_k = uncut[gone["top_k"]].sum()
    return NextToken(
        likeliest,
        Likely("", *(float(p[rest].sum()) for p in (own, uncut, drawn))),
        len(logits),
        int((drawn > 0).sum()),
        entropy_bits(drawn),
        entropy_bits(own),
        float(lost_to_k),
        float(uncut[gone["top_p"] & ~gone["top_k"]].sum()),
    )


def _who(gone: dict[str, Tensor], token: int) -> str:
    """Who leaves a token out, "" for nobody: the first in the order in which they are applied."""
    return next((name for name, lost in gone.items() if lost[token]), "")


def entropy_bits(probabilities: Tensor) -> float:
    """Of a distribution `(vocab,)`, in bits: 0 where one token has it all, log2 of their number where all are alike."""
    p = probabilities[probabilities > 0].double()
    return max(0.0, float(-(p * p.log2()).sum()))


@dataclass(frozen=True)
class Seen:
    """What one call emitted, whether each token was the model's likeliest there, and of each drafted token that was
    tested the probability that one drawn from q is accepted."""

    emitted: tuple[int, ...]
    likeliest: tuple[bool, ...]
    chances: tuple[float, ...]


@dataclass
class SeenLoop(SpeculativeLoop):
    """The loop of `generate`, which keeps what it drafted last and what the target said to it."""

    proposal: Proposal | None = None
    logits: Tensor | None = None

    def draft(self) -> Proposal:
        self.proposal = super().draft()
        return self.proposal

    def forward(self, tokens: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
        self.logits, hidden = super().forward(tokens, **options)
        return self.logits, hidden

    def seen(self, call: Call) -> Seen:
        """The call just made, of one row and with a chain."""
        best = most_likely(self.logits[0, : len(call.emitted)]).tolist()
        tested = call.n_accepted + (call.kind == "residual")
        likeliest = tuple(a == b for a, b in zip(call.emitted, best, strict=True))
        return Seen(call.emitted, likeliest, self._chances(tested) if tested else ())

    def _chances(self, tested: int) -> tuple[float, ...]:
        p = self.sampling.probabilities(self.logits[0, :tested])
        if self.proposal.probs is not None:
            return tuple(acceptance(p, self.proposal.probs[0, :tested]).tolist())
        # Drafted without chance: q is all on the token.
        return tuple(p.gather(1, self.proposal.tokens[0, :tested, None]).squeeze(1).tolist())


@dataclass(frozen=True)
class Draw:
    """One text as the setting asks for it, to be taken call by call by `_speculative_steps.streamed`."""

    decoder: Decoder
    input_ids: Tensor
    proposer: Proposer
    params: SamplingParams
    eos_token_id: int | None

    def loop(self, seed: int, watch: Callable[[Seen], None]) -> SeenLoop:
        """`watch` is told what became of each call."""
        loop = SeenLoop(
            self.decoder,
            self.proposer,
            self.params.sampling,
            seeded_generator(self.decoder.device, seed),
            DRAFTED,
            self.input_ids.shape[1] + self.params.max_new_tokens,
            frozenset(() if self.eos_token_id is None else (self.eos_token_id,)),
            None,
            lambda call: watch(loop.seen(call)),
        )
        return loop


@torch.inference_mode()
def prompt_logits(decoder: Decoder, input_ids: Tensor) -> Tensor:
    """`(vocab,)`: what the model says after `input_ids (1, prompt)`."""
    decoder.reset()
    return decoder.forward(input_ids, logits_to_keep=1)[0, -1].clone()
