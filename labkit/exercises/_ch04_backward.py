"""Exercise `block_backward`: the gradients that one block of keys takes part in, from the row statistics kept.

Dao et al. 2022, FlashAttention, appendix B.2; Dao 2023, FlashAttention-2, Algorithm 2. Compared with autograd through
the whole softmax, in float64.
"""

import torch
from torch import Tensor

from labkit.exercises._ch04_reference import close
from labkit.exercises._exercise import Answer, Exercise, expect, without_labkit
from labkit.exercises._tensors import as_tensor, normal

_SIGNATURE = (
    "block_backward(query, key, value, output, grad_output, lse, softmax_scale) -> (grad_query, grad_key, grad_value)"
)
_OWN = ("attention/", "kernels/", "kv_cache/")
_HEAD_DIM = 6
_NAMES = ("grad_query", "grad_key", "grad_value")
Gradients = tuple[Tensor, Tensor, Tensor]


class _Problem:
    """Attention of `q_len` queries over blocks of keys, its output, its row statistics, and autograd's gradients.

    Every block reads a copy of its own of the queries, so that autograd tells the blocks' parts of dQ apart.
    """

    def __init__(self, seed: int, q_len: int, widths: tuple[int, ...], scale: float, large: float = 1.0) -> None:
        sizes = [(q_len, large), (sum(widths), 1.0), (sum(widths), 1.0), (q_len, 1.0)]
        tensors = [factor * normal(seed + i, n, _HEAD_DIM).double() for i, (n, factor) in enumerate(sizes)]
        self.query, self.scale, self.widths = tensors[0], scale, widths
        self.grad_output = tensors[3]
        self.keys, self.values = (t.split(widths) for t in tensors[1:3])
        queries, keys, values = (
            [t.clone().requires_grad_() for t in leaves]
            for leaves in ([self.query] * len(widths), self.keys, self.values)
        )
        scores = torch.cat([q @ k.T for q, k in zip(queries, keys, strict=True)], -1) * scale
        output = scores.softmax(-1) @ torch.cat(values)
        output.backward(self.grad_output)
        self.output, self.lse = output.detach(), scores.detach().logsumexp(-1)
        self.gradients: list[Gradients] = [
            (q.grad, k.grad, v.grad) for q, k, v in zip(queries, keys, values, strict=True)
        ]

    def arguments(self, block: int) -> tuple[Tensor | float, ...]:
        """What the learner's function gets for a block, in copies."""
        tensors = (self.query, self.keys[block], self.values[block], self.output, self.grad_output, self.lse)
        return *(t.clone() for t in tensors), self.scale


def _run(answer: Answer, problem: _Problem, block: int, where: str) -> Gradients:
    arguments = problem.arguments(block)
    value = without_labkit(lambda: answer(*arguments), _OWN)
    three = isinstance(value, tuple | list) and len(value) == 3
    expect(three, f"return three things, (grad_query, grad_key, grad_value); got {type(value).__name__}")
    kept = all(a is b or torch.equal(a, b) for a, b in zip(arguments[:-1], problem.arguments(block)[:-1], strict=True))
    expect(kept, "what you were given should stay as it is: the other blocks need it")
    shapes = [tuple(t.shape) for t in arguments[:3]]
    return tuple(as_tensor(t, s, f"{n}, {where},") for t, s, n in zip(value, shapes, _NAMES, strict=True))


def _formula(
    problem: _Problem, block: int, *, alone: bool = False, scaled: bool = True, delta: str = "rows"
) -> Gradients:
    """The gradients with one thing done otherwise; `scaled`: the scores, in the weights. grad_output reaches dV."""
    query, key, value, output, grad_output, lse, scale = problem.arguments(block)
    scores = query @ key.T * (scale if scaled else 1.0)
    weights = scores.softmax(-1) if alone else (scores - lse[:, None]).exp()
    grad_weights = grad_output @ value.T
    if delta == "rows":
        subtract = (output * grad_output).sum(-1, keepdim=True)
    else:
        subtract = (weights * grad_weights).sum(-1, keepdim=True) if delta == "block" else 0.0
    grad_scores = weights * (grad_weights - subtract)
    return scale * grad_scores @ key, scale * grad_scores.T @ query, weights.T @ grad_output


def _why(problem: _Problem, block: int, found: Gradients) -> str:
    """The usual mistake that gives these gradients."""
    right = problem.gradients[block]
    unscaled = tuple(g / problem.scale for g in right[:2]) + right[2:]
    query, key, _, _, grad_output, _, scale = problem.arguments(block)
    of_weights = grad_output @ problem.values[block].T * scale
    mistakes = {
        "the softmax was taken over this block alone: lse knows of all blocks": _formula(problem, block, alone=True),
        "the weights do not sum to 1 over one block, and yours did: lse knows of all blocks": _formula(
            problem, block, alone=True, delta="block"
        ),
        "the scores, too, are scaled before lse is subtracted": _formula(problem, block, scaled=False),
        "delta is missing: a weight that grows takes from all others of its row": _formula(problem, block, delta=""),
        "delta is summed over this block alone: output and grad_output know of all blocks": _formula(
            problem, block, delta="block"
        ),
        "the derivative of the scores by query and by key holds softmax_scale": unscaled,
        "the gradient of the weights is not yet that of the scores: softmax has a derivative of its own": (
            of_weights @ key,
            of_weights.T @ query,
            right[2],
        ),
        "this has the sign of minus the gradient": tuple(-g for g in right),
    }
    for text, wrong in mistakes.items():
        agree = [close(a, b, 1e-6) for a, b in zip(found, wrong, strict=True)]
        differs = [not close(a, b, 1e-6) for a, b in zip(wrong, right, strict=True)]
        if all(ok for ok, other in zip(agree, differs, strict=True) if other) and any(differs):
            return f": {text}"
    return ""


def _test_blocks(answer: Answer, problem: _Problem, words: str = "") -> None:
    """Every block's own part."""
    count = len(problem.widths)
    for block, width in enumerate(problem.widths):
        where = f"for block {block + 1} of {count} ({width} keys of {sum(problem.widths)}){words}"
        found, right = _run(answer, problem, block, where), problem.gradients[block]
        wrong = [name for name, a, b in zip(_NAMES, found, right, strict=True) if not close(a, b, 1e-6)]
        told = f"{where}, {' and '.join(wrong)} should be what autograd gives"
        expect(not wrong, told + (_why(problem, block, found) if wrong else ""))


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    for seed, q_len, widths, scale in (
        (10, 5, (8,), _HEAD_DIM**-0.5), (20, 7, (4, 4, 3), _HEAD_DIM**-0.5), (30, 1, (2, 5), 0.7), (40, 9, (1, 6), 0.1),
        (60, 11, (7, 7, 7, 2), 0.4),
    ):  # fmt: skip
        _test_blocks(answer, _Problem(seed, q_len, widths, scale))
    large = _Problem(50, 6, (5, 5), 1.0, large=500.0)
    _test_blocks(answer, large, ", with scores in the thousands: subtract before exp, or it overflows")
    return "every block's part of dQ, and its dK and dV, are autograd's: from one number a row, with no weight stored"


BLOCK_BACKWARD = Exercise(
    name="block_backward",
    chapter=4,
    task="The backward pass of one block of keys: recompute its weights from the row's log-sum-exp, and give its part "
    "of dQ, and its dK and dV.",
    signature=_SIGNATURE,
    hints=(
        "The weights of this block within the whole row are exp(scores - lse): no maximum and no sum are needed. Which "
        "of dQ, dK and dV needs nothing more than them and grad_output?",
        "With P the weights, dP = grad_output @ value^T, and dS = P * (dP - delta), where delta is one number for each "
        "row: the sum of grad_output * output. The sum over the row of P * dP is the same number.",
        "P = (query @ key.T * softmax_scale - lse[:, None]).exp(); grad_value = P.T @ grad_output; dS as above; "
        "grad_query = dS @ key * softmax_scale; grad_key = dS.T @ query * softmax_scale.",
    ),
    test=_test,
)
