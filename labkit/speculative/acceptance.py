"""Which drafted tokens the target keeps, and the one it adds: q is the draft's distribution, p the target's.

Accept the drafted x with probability min(1, p(x) / q(x)); at the first rejection draw from norm(max(0, p - q)) in its
place; where all are accepted, draw one more from p, the bonus. Every emitted token then has exactly the distribution
p (Leviathan et al., 2023, algorithm 1 and appendix A.1; Chen et al., 2023, algorithm 2 and theorem 1): x is emitted
with q(x) min(1, p(x) / q(x)) = min(p(x), q(x)), and the residual, which comes up with probability
1 - sum min(p, q) = sum max(0, p - q), brings max(0, p(x) - q(x)) more: p(x) in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from labkit import _check

if TYPE_CHECKING:
    from labkit.speculative.tree import DraftTree

_FLOATS = (torch.float32, torch.float64)
_IDS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Verdict:
    """Of each row: how many drafted tokens it keeps, `n_accepted (batch,)`, and the token after them, `next_token
    (batch,)`, both int64: the residual's after a rejection, the bonus otherwise."""

    n_accepted: torch.Tensor
    next_token: torch.Tensor


@dataclass(frozen=True)
class TreeVerdict:
    """Of each row: the accepted nodes from the root's child down, as indices into the drafted tokens (the root is not
    one), and the token after the last of them, `next_token (batch,)`, int64."""

    paths: list[list[int]]
    next_token: torch.Tensor


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The probability that a token drawn from q is accepted: sum min(p, q) over the last dimension (Leviathan et al.,
    2023, theorem 3.5), which is 1 minus the total variation. `p`, `q` `(..., vocab)` to `(...)`."""
    return torch.minimum(p, q).sum(-1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(0, p - q)) over the last dimension of `p`, `q` `(..., vocab)`: what is drawn from after a rejection.
    p where nothing is left, as it can be where p and q differ by rounding alone."""
    left = (p - q).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


# How far a distribution's sum may be from 1, by rounding over a large vocabulary.
_OFF_ONE = 1e-2


def _sound(total: torch.Tensor) -> torch.Tensor:
    return (total > 0) & (total < torch.inf)


def _draw(weights: torch.Tensor, uniform: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """One index a row of `weights (batch, vocab)`, in proportion to them; `uniform (batch,)`, float64, from [0, 1).
    From `otherwise`, shaped as they are, in the rows where all weights are 0.

    The first place where the running sum passes uniform times the total: a weight of 0 is never it. In float64, since
    tens of thousands of float32 terms would lose the small ones. One random number a row, where `torch.multinomial`
    draws one a token.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    if not bool(_sound(total).all()):
        takes = "a distribution in each row"
        usable = otherwise is not None and bool((_sound(total) | (total == 0)).all())
        _check.require(usable, "p", "probabilities that sum to 0, NaN or infinity", takes)
        return _draw(torch.where(total > 0, weights, otherwise), uniform)
    return torch.searchsorted(sums, uniform[:, None] * total, right=True).squeeze(1)


def _leading_run(accepted: torch.Tensor) -> torch.Tensor:
    """How many are True before the first False in each row of `accepted (batch, k)`."""
    return accepted.long().cumprod(1).sum(1)


def _check_ids(name: str, ids: torch.Tensor, shape: tuple[int, int] | None = None) -> torch.Tensor:
    _check.tensor(name, ids, ndim=2, dtypes=_IDS)
    _check.require(shape is None or tuple(ids.shape) == shape, name, f"shape {tuple(ids.shape)}", f"{shape}")
    return ids.long()


def accept_greedy(drafts: torch.Tensor, targets: torch.Tensor) -> Verdict:
    """The rule at temperature 0, where p is all on its argmax: keep drafts for as long as they are what the target
    says, then take what it says. `drafts (batch, k)`, k from 0; `targets (batch, k + 1)`: the target's argmax after
    each place, the first of them after the last verified token."""
    drafts = _check_ids("drafts", drafts)
    batch, k = drafts.shape
    targets = _check_ids("targets", targets, (batch, k + 1))
    n_accepted = _leading_run(drafts == targets[:, :k])
    return Verdict(n_accepted, targets.gather(1, n_accepted[:, None]).squeeze(1))


def _check_distribution(name: str, probs: torch.Tensor) -> None:
    """Of `probs (..., vocab)`: none below 0, each row's sum 1 up to rounding. NaN and infinity fail the sum."""
    total = probs.sum(-1, dtype=torch.float32)
    usable = ((total - 1).abs() < _OFF_ONE).all() & (probs >= 0).all()
    _check.require(bool(usable), name, "probabilities that do not sum to 1", "a distribution in each row")


@dataclass(frozen=True)
class Drafted:
    """A checked chain with what a rule compares: `p_x`, `q_x` `(batch, k)`, float64, the probabilities of the drafted
    tokens, and `uniform (batch, k + 1)`, float64, the last of each row for the residual or bonus."""

    drafts: torch.Tensor
    q: torch.Tensor | None
    p: torch.Tensor
    p_x: torch.Tensor
    q_x: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def of(cls, drafts: torch.Tensor, q: torch.Tensor | None, p: torch.Tensor, generator: torch.Generator) -> Drafted:
        """Arguments as `accept_sampled` takes them."""
        drafts = _check_ids("drafts", drafts)
        batch, k = drafts.shape
        _check.tensor("p", p, ndim=3, dtypes=_FLOATS)
        vocab = p.shape[-1]
        wanted = (batch, k + 1, vocab)
        _check.require(tuple(p.shape) == wanted, "p", f"shape {tuple(p.shape)}", f"(batch, k + 1, vocab) = {wanted}")
        if q is not None:
            _check.tensor("q", q, ndim=3, dtypes=_FLOATS)
            wanted = (batch, k, vocab)
            _check.require(tuple(q.shape) == wanted, "q", f"shape {tuple(q.shape)}", f"(batch, k, vocab) = {wanted}")
            # With another q the rule would let drafts in that are none of the target's.
            _check_distribution("q", q)
        _check_distribution("p", p)
        if drafts.device.type == "cpu" and drafts.numel():
            low, high = map(int, drafts.aminmax())
            _check.require(0 <= low and high < vocab, "drafts", f"ids {low} to {high}", f"0 to {vocab - 1}")
        _check.require(isinstance(generator, torch.Generator), "generator", generator, "a torch.Generator")
        places = drafts[..., None]
        p_x = p[:, :k].gather(-1, places).squeeze(-1).double()
        q_x = torch.ones_like(p_x) if q is None else q.gather(-1, places).squeeze(-1).double()
        # float64: a float32 number from [0, 1) is 0 once in 2^24, which would let in what is rarer than that.
        uniform = torch.rand(batch, k + 1, generator=generator, device=p.device, dtype=torch.float64)
        return cls(drafts, q, p, p_x, q_x, uniform)

    def verdict(self, accepted: torch.Tensor) -> Verdict:
        """Given which tokens `(batch, k)` pass, each taken alone: those before the first that does not are kept."""
        batch, k = self.drafts.shape
        n_accepted = _leading_run(accepted)
        rows = torch.arange(batch, device=self.p.device)
        p = self.p[rows, n_accepted]
        if not k:
            return Verdict(n_accepted, _draw(p, self.uniform[:, k]))
        # All accepted: nothing is taken away, and the draw is from p, the bonus.
        rejected, at = (n_accepted < k).to(p.dtype)[:, None], n_accepted.clamp(max=k - 1)
        if self.q is None:
            # The point mass takes its own token away, and leaves the rest as it is.
            left = p.scatter_add(1, self.drafts[rows, at][:, None], -rejected)
        else:
            left = torch.addcmul(p, self.q[rows, at], rejected, value=-1)
        return Verdict(n_accepted, _draw(left.clamp_(min=0), self.uniform[:, k], otherwise=p))


def accept_sampled(
    drafts: torch.Tensor, q: torch.Tensor | None, p: torch.Tensor, generator: torch.Generator
) -> Verdict:
    """Accept each of `drafts (batch, k)`, k from 0, with min(1, p/q), up to the first rejection; see the module.

    `q (batch, k, vocab)`: what the tokens were drawn from; None: each was chosen without chance, so that q is all on
    it, p(x) is the probability of keeping it, and the residual is p without it. `p (batch, k + 1, vocab)`: the
    target's distribution after each place. Both float32 or float64, on one device. Rows accept different numbers.
    A token to which q gives 0 cannot come from q: it is accepted wherever p gives it anything, as p/q is without
    bound there. What p gives 0 is never emitted. Errors: ValueError for shapes, dtypes, ids, or a p or q
    that is no distribution.
    """
    drafted = Drafted.of(drafts, q, p, generator)
    # u < p/q without the division, which would be 0/0 at a token that neither gives anything.
    return drafted.verdict(drafted.uniform[:, :-1] * drafted.q_x < drafted.p_x)


def accept_tree(
    tree: DraftTree, drafts: torch.Tensor, p: torch.Tensor, generator: torch.Generator | None = None
) -> TreeVerdict:
    """Walk down from the root: at each node the target's token is drawn, and followed into the child that has it.

    `drafts (batch, nodes)`: the token of each node, chosen without chance. `p`: the target's distribution after the
    root and each node, `(batch, nodes + 1, vocab)`; or, greedy, its argmax there, `(batch, nodes + 1)`, int64.

    This is the rule for several drafts of one place (SpecInfer: Miao et al., 2024, algorithm 2; EAGLE: Li et al.,
    2024, appendix), where each is a point mass. Tried in turn, child 1 is accepted with p(x1), after which p loses x1
    and is scaled up; child 2 then with p(x2) / (1 - p(x1)), so with p(x2) in all; and so on, and what is left is p
    without any child's token. One draw from p gives each outcome the same probability. Where two children of a node
    have the same token, the first is taken.
    """
    drafts = _check_ids("drafts", drafts)
    batch, nodes = drafts.shape
    _check.require(nodes == len(tree), "drafts", f"{nodes} tokens a row", f"{len(tree)}, one a node of the tree")
    greedy = isinstance(p, torch.Tensor) and not p.is_floating_point()
    if greedy:
        _check_ids("p", p, (batch, nodes + 1))
    else:
        _check.tensor("p", p, ndim=3, dtypes=_FLOATS)
        ok = tuple(p.shape[:2]) == (batch, nodes + 1)
        _check.require(ok, "p", f"shape {tuple(p.shape)}", f"({batch}, {nodes + 1}, vocab)")
        _check_distribution("p", p)
        _check.require(isinstance(generator, torch.Generator), "generator", generator, "a torch.Generator to draw from")
        uniform = torch.rand(batch, tree.depth + 1, generator=generator, device=p.device, dtype=torch.float64)
    parents = torch.tensor(tree.parents, device=drafts.device)
    rows = torch.arange(batch, device=drafts.device)
    node = torch.zeros(batch, dtype=torch.int64, device=drafts.device)
    token, walked = node, []
    going = torch.ones_like(node, dtype=torch.bool)
    for level in range(tree.depth + 1):
        drawn = p[rows, node].long() if greedy else _draw(p[rows, node], uniform[:, level])
        token = torch.where(going, drawn, token)
        if level == tree.depth:
            break
        child = (parents == node[:, None]) & (drafts == token[:, None]) & going[:, None]
        going = child.any(1)
        if not bool(going.any()):
            break
        node = torch.where(going, child.long().argmax(1) + 1, node)
        walked.append(torch.where(going, node - 1, -1))
    steps = torch.stack(walked, 1).tolist() if walked else [[]] * batch
    return TreeVerdict([[index for index in path if index >= 0] for path in steps], token)
