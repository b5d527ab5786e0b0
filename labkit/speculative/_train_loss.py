"""What a drafter is trained towards: to say what the target said next, on its own answers too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from labkit.speculative._train_data import Sample
from labkit.speculative.eagle_model import EagleModel
from labkit.training import computing_in

# A step further on counts so much less: a draft gets there only if all before were right.
_LATER = 0.8


def draft_vocabulary(samples: Sequence[Sample], vocab_size: int, size: int) -> tuple[Tensor, float]:
    """Ids `(size,)`, ascending, of the tokens that are commonest in the answers, and their share of all of those."""
    counts = torch.zeros(vocab_size)
    for sample in samples:
        answer = sample.tokens[sample.prompt :].long()
        counts.scatter_add_(0, answer, torch.ones(len(answer)))
    top = counts.topk(size)
    return top.indices.sort().values, float(top.values.sum() / counts.sum())


class EagleObjective:
    """Cross-entropy of the target's distribution over the draft vocabulary under the head's, at each step of the drafts
    that start at every place; later steps count less.

    from_answer: only drafts of the answer. Without it a user's words teach too: what the target would have said there
    is as good a lesson, and costs no decoding.
    """

    def __init__(
        self,
        model: EagleModel,
        target: PreTrainedModel,
        batches: Sequence[Sequence[Sample]],
        *,
        template_tokens: int = 0,
        from_answer: bool = False,
    ) -> None:
        self.model, self.batches = model, batches
        self.template_tokens, self.from_answer = template_tokens, from_answer
        self.device = target.device
        self.embedding = target.get_input_embeddings().weight.detach()
        self.head = target.get_output_embeddings().weight.detach()[model.draft_ids.long()]
        longest = max(len(sample.tokens) for batch in batches for sample in batch)
        self.rotary = tuple(table.to(self.device) for table in model.rotary_table(2 * longest))

    def backward(self, batch: int, steps: int) -> float:
        """The loss of one batch over drafts of `steps` tokens, in nats; its gradients are added to the parameters'."""
        losses, _ = self.losses(self.batches[batch], steps)
        loss = sum(_LATER**step * value for step, value in enumerate(losses))
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def matches(self, steps: int) -> tuple[float, ...]:
        """Over all batches: of each step, the share of places where the likeliest token is the target's."""
        found = torch.tensor([self.losses(batch, steps)[1] for batch in self.batches])
        return tuple(found.mean(0).tolist())

    def losses(self, samples: Sequence[Sample], steps: int) -> tuple[list[Tensor], list[float]]:
        """Of each step: the mean cross-entropy, and the share of places where the likeliest token is the target's."""
        tokens, hidden, counted = self._padded(samples, steps)
        length = hidden.shape[1] - steps
        later = [slice(1 + step, 1 + step + length) for step in range(steps)]
        embedded = [F.embedding(tokens[:, at], self.embedding) for at in later]
        losses, matches = [], []
        with computing_in(torch.bfloat16, self.device):
            features = self.model.unrolled(embedded, hidden[:, :length], self.rotary)
            for feature, at in zip(features, later, strict=True):
                places = counted[:, at]
                with torch.no_grad():
                    wanted = F.linear(hidden[:, at][places], self.head).float()
                said = F.linear(feature[places], self.head).float()
                losses.append(-(wanted.softmax(-1) * said.log_softmax(-1)).sum(-1).mean())
                matches.append(float((said.argmax(-1) == wanted.argmax(-1)).float().mean()))
        return losses, matches

    def _padded(self, samples: Sequence[Sample], steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """tokens and hidden states with room for a draft beyond the end; True where a place counts."""
        rows = max(len(sample.hidden) for sample in samples) - 1 + steps
        tokens = torch.zeros(len(samples), rows + 1, dtype=torch.int64)
        hidden = torch.zeros(len(samples), rows, self.embedding.shape[1], dtype=samples[0].hidden.dtype)
        counted = torch.zeros(len(samples), rows, dtype=torch.bool)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = sample.tokens
            hidden[row, : len(sample.hidden)] = sample.hidden
            first = sample.prompt - 1 if self.from_answer else self.template_tokens
            counted[row, first : len(sample.hidden)] = True
        return tokens.to(self.device), hidden.to(self.device), counted.to(self.device)


def in_batches(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Batches of samples of like length, so that little is padded."""
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]
