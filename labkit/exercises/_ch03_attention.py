"""Exercise `fixed_attention`: attention with a cache that is never read, heads in the wrong order, and half a mask.

The form with the faults, as the notebook shows it:

    def cached_attention(query, key, value, past=None):
        groups = query.shape[1] // key.shape[1]
        keys, values = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
        scores = query @ keys.mT / query.shape[-1] ** 0.5
        if past is None:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return scores.softmax(-1) @ values, (key, value)

The order of heads is wrong in a way that MHA and MQA hide, `past` is accepted and not read, and a mask that is right
for a first pass is missing where several tokens follow a past.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.exercises._exercise import Answer, Exercise, expect, without_labkit
from labkit.exercises._tensors import as_tensor, normal

_SIGNATURE = "fixed_attention(query, key, value, past=None) -> (output, past)"
_OWN = ("attention/", "kernels/", "kv_cache/")
_BATCH, _HEAD_DIM, _LENGTH = 2, 8, 9


@dataclass(frozen=True)
class _Problem:
    """query (batch, heads, length, head_dim); key and value (batch, kv_heads, length, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, heads: int, kv_heads: int, seed: int = 0) -> "_Problem":
        shapes = [(_BATCH, n, _LENGTH, _HEAD_DIM) for n in (heads, kv_heads, kv_heads)]
        return cls(*(normal(seed + i, *shape) for i, shape in enumerate(shapes)))

    def tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(t[:, :, start:stop].clone() for t in (self.query, self.key, self.value))

    def target(self, head_of: Tensor | None = None, *, scaled: bool = True, causal: bool = True) -> Tensor:
        """Attention in float64, query head h with KV head `head_of[h]`: h // (heads / kv_heads) unless given."""
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        head_of = torch.arange(heads) // (heads // kv_heads) if head_of is None else head_of
        query, key, value = self.query.double(), self.key.double()[:, head_of], self.value.double()[:, head_of]
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / (_HEAD_DIM**0.5 if scaled else 1.0)
        future = torch.arange(_LENGTH)[None, :] > torch.arange(_LENGTH)[:, None]
        if causal:
            scores = scores.masked_fill(future, -torch.inf)
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-4)


def _step(answer: Answer, problem: _Problem, start: int, stop: int, past: object) -> tuple[Tensor, object]:
    """The output for tokens start to stop, and what was returned to carry on from: K and V of all tokens so far."""
    tokens = problem.tokens(start, stop)
    arguments = tokens if past is None else (*tokens, past)
    value = without_labkit(lambda: answer(*arguments), _OWN)
    pair = isinstance(value, tuple | list) and len(value) == 2
    expect(pair, f"return two things, (output, past); got {type(value).__name__}")
    output = as_tensor(value[0], tuple(tokens[0].shape), f"the output for {stop - start} tokens")
    cache = value[1]
    form = isinstance(cache, tuple | list) and len(cache) == 2 and all(isinstance(t, Tensor) for t in cache)
    expect(form, "past should be the keys and the values of all tokens so far, (keys, values)")
    for kept, name in zip(cache, ("keys", "values"), strict=True):
        _expect_kept(kept, name, problem, stop)
    return output, cache


def _expect_kept(kept: Tensor, name: str, problem: _Problem, length: int) -> None:
    """The cache holds one head for each KV head, and every token."""
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    found = tuple(kept.shape)
    repeated = kept.ndim == 4 and found[1] == heads != kv_heads
    told = f"the cache keeps {kv_heads} heads of {name} and not {heads}: repeat them after they are stored"
    expect(not repeated, f"{told}, or GQA saves no memory")
    wanted = (_BATCH, kv_heads, length, _HEAD_DIM)
    why = ": is the past joined with the new tokens, and all of it returned?" if found[2:3] != (length,) else ""
    expect(found == wanted, f"after {length} tokens past should hold {name} of {wanted}; yours has {found}{why}")


def _heads(problem: _Problem) -> str:
    return f"{problem.query.shape[1]} query heads on {problem.key.shape[1]} KV heads"


def _why_wrong(problem: _Problem, output: Tensor) -> str:
    """What a first pass over all tokens, without a past, got wrong."""
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    order = torch.arange(heads) % kv_heads
    wrong_order = (
        f"head h reads KV head h % {kv_heads}, and should read h // {heads // kv_heads}: neighbours share, as "
        "repeat_interleave gives it and repeat does not"
    )
    mistakes = {
        "the scores are divided by sqrt(head_dim)": problem.target(scaled=False),
        "a token may not see those after it: mask them": problem.target(causal=False),
        wrong_order: problem.target(order),
        f"{wrong_order}; and a token may not see those after it": problem.target(order, causal=False),
    }
    return next((f": {text}" for text, wrong in mistakes.items() if _same(output, wrong)), "")


def _test_whole(answer: Answer, heads: int, kv_heads: int) -> None:
    """All tokens at once, no past: heads in their order, no token sees a later one."""
    problem = _Problem.of(heads, kv_heads)
    output, _ = _step(answer, problem, 0, _LENGTH, None)
    right = _same(output, problem.target())
    why = "" if right else _why_wrong(problem, output)
    expect(right, f"in one pass without a past, {_heads(problem)}, the output is not attention's{why}")


def _test_token_zero(answer: Answer) -> None:
    """The value of token 0 changed before the first step must show in the last."""
    problem = _Problem.of(4, 2, seed=10)
    other = _Problem(problem.query, problem.key, problem.value.clone())
    other.value[:, :, 0] += 1
    last = []
    for tokens in (problem, other):
        _, past = _step(answer, tokens, 0, 1, None)
        for at in range(1, _LENGTH):
            output, past = _step(answer, tokens, at, at + 1, past)
        last.append(output)
    told = "token by token, a change of token 0's value does not reach the last output"
    expect(not _same(*last), f"{told}: is past read, and is token 0 in it?")


def _why_chunk(problem: _Problem, output: Tensor, start: int, stop: int) -> str:
    """What a step of tokens start to stop after a past got wrong."""
    blind = _Problem(problem.query[:, :, start:stop], problem.key[:, :, start:stop], problem.value[:, :, start:stop])
    size = stop - start
    query, key, value = (t.double() for t in (blind.query, blind.key, blind.value))
    groups = query.shape[1] // key.shape[1]
    whole = [t[:, :, :stop].double().repeat_interleave(groups, 1) for t in (problem.key, problem.value)]
    scores = query @ whole[0].mT / _HEAD_DIM**0.5
    early = scores.masked_fill(~torch.ones(size, stop, dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ whole[1]
    new = query @ key.repeat_interleave(groups, 1).mT / _HEAD_DIM**0.5
    alone = new.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    mistakes = {
        "each of the new tokens sees all of them: with a past, too, a token may not see those after it": (
            scores.softmax(-1) @ whole[1]
        ),
        "the mask is laid at the start: the first of the new tokens sees the whole past, so shift it by the past's "
        "length": early,
        "the new tokens see one another alone: past is stored, and not read": (
            alone @ value.repeat_interleave(groups, 1)
        ),
        "the new tokens see one another alone, those after them too": (
            new.softmax(-1) @ value.repeat_interleave(groups, 1)
        ),
    }
    return next((f": {text}" for text, wrong in mistakes.items() if _same(output, wrong)), "")


def _test_steps(answer: Answer, heads: int, kv_heads: int, sizes: list[int]) -> None:
    """The tokens in steps of those sizes give what one pass over all of them gives."""
    problem, start, past = _Problem.of(heads, kv_heads, seed=20), 0, None
    target = problem.target()
    for size in sizes:
        stop = start + size
        output, past = _step(answer, problem, start, stop, past)
        right = _same(output, target[:, :, start:stop])
        why = "" if right else _why_chunk(problem, output, start, stop)
        step = f"{size} token{'s' * (size > 1)} after a past of {start}, {_heads(problem)}"
        expect(right, f"{step}: the output should be that of one pass over all tokens{why}")
        start = stop


def _test_two_futures(answer: Answer) -> None:
    """Two continuations of one past: the first may not leave its tokens in what the second reads."""
    problem = _Problem.of(4, 2, seed=30)
    _, past = _step(answer, problem, 0, 5, None)
    _step(answer, problem, 5, 7, past)
    kept = isinstance(past, tuple | list) and past[0].shape[2] == 5
    expect(kept, "your function changed the past that it was given: return a new one, since another step may read it")
    output, _ = _step(answer, problem, 5, 7, past)
    expect(_same(output, problem.target()[:, :, 5:7]), "a second step from the same past gives another output")


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    for heads, kv_heads in ((6, 2), (4, 4), (4, 1)):
        _test_whole(answer, heads, kv_heads)
    _test_token_zero(answer)
    for heads, kv_heads in ((4, 4), (6, 2), (6, 3), (4, 1)):
        for sizes in ([1] * _LENGTH, [5, 1, 1, 1, 1], [4, 5], [1, 3, 5]):
            _test_steps(answer, heads, kv_heads, sizes)
    _test_two_futures(answer)
    return "token by token or several at a time, the outputs are those of one pass, token 0 and the order of heads too"


FIXED_ATTENTION = Exercise(
    name="fixed_attention",
    chapter=3,
    task="Find the bugs: three faults in attention with a cache, two of which no test with one pass can see. Mend it.",
    signature=_SIGNATURE,
    hints=(
        "Run it once over all tokens, and once token by token: should the outputs differ? Which argument is never "
        "read? And which query heads share a KV head?",
        "Join past and new tokens first, along dimension 2, and return what you joined, not repeated. Query head h "
        "reads KV head h // groups: repeat gives h % kv_heads.",
        "keys.repeat_interleave(groups, dim=1); and mask with torch.ones(q_len, kv_len, dtype=torch.bool)"
        ".triu(kv_len - q_len + 1), always: for one new token that masks nothing.",
    ),
    test=_test,
)
