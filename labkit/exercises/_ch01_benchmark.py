"""Exercise `fixed_benchmark`: a benchmark that assumes every run made all its tokens, run against one that stops early.

The form with the fault, as the notebook shows it:

    def benchmark(generate, prompts, max_new_tokens, clock):
        start = clock()
        for prompt in prompts:
            generate(prompt, max_new_tokens)
        return len(prompts) * max_new_tokens / (clock() - start)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.exercises._exercise import Answer, Exercise, expect, near

_SIGNATURE = "fixed_benchmark(generate, prompts, max_new_tokens, clock) -> tokens per second"
_EOS = 0


@dataclass
class _FakeModel:
    """Makes `lengths[i]` tokens for prompt i, the last of them EOS where that is fewer than asked for; its clock runs
    `first_s` for a prompt and `token_s` for each token."""

    lengths: Sequence[int]
    token_s: float = 0.5
    first_s: float = 0.0
    now: float = 100.0
    calls: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The prompt, then the new tokens."""
        length = min(self.lengths[len(self.calls) % len(self.lengths)], max_new_tokens)
        self.calls.append((tuple(prompt), max_new_tokens))
        self.now += self.first_s + self.token_s * length
        stopped = length < max_new_tokens
        return [*prompt, *([7] * (length - stopped)), *([_EOS] * (stopped and length > 0))]

    def clock(self) -> float:
        return self.now


def _run(answer: Answer, model: _FakeModel, prompts: list[list[int]], max_new_tokens: int) -> float:
    rate = answer.number(model.generate, prompts, max_new_tokens, model.clock)
    wanted = [(tuple(prompt), max_new_tokens) for prompt in prompts]
    expect(model.calls == wanted, "call generate(prompt, max_new_tokens) once for each prompt, in order, and no more")
    return rate


def _test_case(answer: Answer, what: str, lengths: list[int], first_s: float = 0.0) -> None:
    """A run of three prompts of 2, 4 and 6 tokens, asked for 8 new ones each; names a usual wrong rate."""
    prompts, asked = [[5] * n for n in (2, 4, 6)], 8
    model = _FakeModel(lengths, first_s=first_s)
    start = model.now
    rate = _run(answer, model, prompts, asked)
    seconds, made, given = model.now - start, sum(lengths), sum(map(len, prompts))
    mistakes = {
        "it counts the tokens that were asked for": len(prompts) * asked,
        "it counts the prompts' tokens with the new ones": made + given,
        "it leaves out EOS, which was made too": made - sum(0 < n < asked for n in lengths),
    }
    why = next((f": {text}" for text, count in mistakes.items() if near(rate, count / seconds)), "")
    if rate > 1000 * made / seconds:
        why = ": is the time taken from the clock that it is given?"
    right = f"{made} tokens in {seconds:g} s of the clock are {made / seconds:.3g} tokens/s"
    expect(near(rate, made / seconds), f"{what}: {right}; yours says {rate:.3g}{why}")


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_case(answer, "when every run makes all its tokens", [8, 8, 8])
    _test_case(answer, "when runs stop early at EOS", [8, 3, 1])
    mean = "with one long and two short runs (all tokens over all seconds, not the mean of the runs' rates)"
    _test_case(answer, mean, [8, 1, 1], first_s=2.0)
    _test_case(answer, "when a run makes no token at all", [8, 0, 2], first_s=0.5)
    return "counts the tokens that were made, over the seconds that they took, however early the runs stop"


FIXED_BENCHMARK = Exercise(
    name="fixed_benchmark",
    chapter=1,
    task="Find the bug: this benchmark reports more tokens per second than were made (EOS is made too). Mend it.",
    signature=_SIGNATURE,
    hints=(
        "What does the benchmark report when a run ends at EOS after three tokens?",
        "generate returns the prompt's ids and then the new ones: count what came back, run by run.",
        "made += len(generate(prompt, max_new_tokens)) - len(prompt) inside the loop; return made / (clock() - start).",
    ),
    test=_test,
)
