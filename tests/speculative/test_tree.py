"""Trees of drafts: their shape, the walk that accepts one path, and the target's distribution by it."""

from itertools import zip_longest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine import Decoder
from labkit.models import tiny_model
from labkit.speculative.acceptance import TreeVerdict, accept_greedy, accept_tree
from labkit.speculative.tree import DraftTree

from .chains import DRAWS, VOCAB, Call, joint, three_tokens, transitions
from .distribution import chi_square_p_value, counted

ENOUGH = 1e-3

RANKS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]
TREE = DraftTree.of_ranks(RANKS)

any_tree = st.lists(st.floats(0, 1), max_size=12).map(
    lambda shares: DraftTree(tuple(min(node, int(share * (node + 1))) for node, share in enumerate(shares)))
)


def test_a_tree_by_hand() -> None:
    assert TREE.parents == (0, 0, 0, 1, 1, 2, 4, 4) and len(TREE) == 8
    assert TREE.depths == (1, 1, 1, 2, 2, 2, 3, 3) and TREE.depth == 3 and TREE.widths == (3, 3, 2)
    assert TREE.ranks == (0, 1, 2, 0, 1, 0, 0, 1)
    assert [TREE.children(node) for node in (0, 1, 2, 3, 4)] == [(1, 2, 3), (4, 5), (6,), (), (7, 8)]
    rows = [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 1, 5], [0, 2, 6], [0, 1, 4, 7], [0, 1, 4, 8]]
    assert [row.nonzero().squeeze(1).tolist() for row in TREE.mask] == rows
    assert TREE.mask.dtype == torch.bool and TREE.mask is TREE.mask
    assert TREE.cut(2).parents == (0, 0, 0, 1, 1, 2) and TREE.cut(1) == DraftTree((0, 0, 0)) and TREE.cut(3) is TREE
    assert DraftTree.of_ranks(RANKS[::-1]) == TREE and hash(DraftTree.of_ranks(RANKS)) == hash(TREE)


def test_a_chain_and_an_empty_tree() -> None:
    chain = DraftTree.chain(3)
    assert chain.parents == (0, 1, 2) and chain.widths == (1, 1, 1) and chain.ranks == (0, 0, 0)
    assert torch.equal(chain.mask, torch.ones(4, 4).tril().bool())
    for empty in (DraftTree(()), DraftTree.chain(0), chain.cut(0), DraftTree.of_ranks([])):
        assert len(empty) == empty.depth == 0 and empty.widths == empty.depths == empty.ranks == ()
        assert empty.mask.tolist() == [[True]] and empty.children(0) == ()


@given(any_tree, st.integers(0, 6))
def test_what_a_tree_says_of_itself_agrees(tree: DraftTree, depth: int) -> None:
    """In any order that puts ancestors first, not only level by level."""
    for node, parent in enumerate(tree.parents, 1):
        path, above = [node], parent
        while above:
            path.insert(0, above)
            above = tree.parents[above - 1]
        assert tree.mask[node].nonzero().squeeze(1).tolist() == [0, *path]
        assert tree.depths[node - 1] == len(path)
        assert tree.children(parent)[tree.ranks[node - 1]] == node
    assert sum(tree.widths) == len(tree) and len(tree.widths) == tree.depth
    cut = tree.cut(depth)
    kept = [node for node, at in enumerate(tree.depths, 1) if at <= depth]
    assert cut.depths == tuple(tree.depths[node - 1] for node in kept)
    kept = [0, *kept]
    assert torch.equal(cut.mask, tree.mask[kept][:, kept])


@pytest.mark.parametrize(
    ("parents", "message"),
    [((1,), r"parents\[0\]: got 1"), ((0, -1), r"parents\[1\]: got -1"), ((0, 0.5), r"parents\[1\]"), (3, "parents: ")],
)
def test_parents_that_are_no_tree_are_refused(parents: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(parents)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (0,)], "each path once"),
        ([()], "none that is empty"),
        ([(0, 0)], r"\(0, 0\) only with \(0,\), which it continues"),
        ([(0,), (2,)], r"\(2,\) only with \(1,\), likelier"),
        ([(-1,)], "paths: got -1"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree.of_ranks(paths)


def test_a_decoder_takes_the_mask() -> None:
    """Each node's logits are those of its path alone."""
    model = tiny_model()
    tokens = torch.arange(5, 5 + len(TREE) + 1)[None]
    decoder = Decoder(model)
    decoder.forward(torch.tensor([[1, 2, 3]]))
    whole = decoder.forward(tokens, tree_mask=TREE.mask)
    for node in range(len(TREE) + 1):
        decoder.crop(3)
        path = TREE.mask[node].nonzero().squeeze(1)
        torch.testing.assert_close(whole[:, node], decoder.forward(tokens[:, path])[:, -1], atol=1e-5, rtol=1e-4)


def walk(tree: DraftTree, drafts: list[int], says: list[int]) -> tuple[list[int], int]:
    """The rule for one row, written out."""
    node, path = 0, []
    while True:
        following = [child for child in tree.children(node) if drafts[child - 1] == says[node]]
        if not following:
            return path, says[node]
        node = following[0]
        path.append(node - 1)


@given(any_tree, st.integers(0, 2**31), st.integers(1, 4))
def test_greedy_walks_down_as_a_loop_does(tree: DraftTree, seed: int, batch: int) -> None:
    """Rows stop at different depths; of two children with one token the first is taken."""
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, 3, (batch, len(tree)), generator=generator)
    targets = torch.randint(0, 3, (batch, len(tree) + 1), generator=generator)
    verdict = accept_tree(tree, drafts, targets)
    expected = [walk(tree, *row) for row in zip(drafts.tolist(), targets.tolist(), strict=True)]
    assert verdict.paths == [path for path, _ in expected]
    assert verdict.next_token.tolist() == [token for _, token in expected]
    certain = torch.nn.functional.one_hot(targets, 3).float()
    drawn = accept_tree(tree, drafts, certain, generator)
    assert drawn.paths == verdict.paths and torch.equal(drawn.next_token, verdict.next_token)


@given(st.integers(0, 5), st.integers(0, 2**31))
def test_a_chain_is_accepted_as_a_chain(k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, 2, (20, k), generator=generator)
    targets = torch.randint(0, 2, (20, k + 1), generator=generator)
    tree, chain = accept_tree(DraftTree.chain(k), drafts, targets), accept_greedy(drafts, targets)
    assert [list(range(n)) for n in chain.n_accepted.tolist()] == tree.paths
    assert torch.equal(tree.next_token, chain.next_token)


def tree_call(tree: DraftTree, target: torch.Tensor, draft: torch.Tensor, accept=accept_tree) -> Call:
    """Drafts at each node the token of its rank among the draft's likeliest after its parent."""
    order = draft.argsort(-1, descending=True)

    def call(last: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        tokens = [last]
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            tokens.append(order[tokens[parent], rank])
        fed = torch.stack(tokens, 1)
        verdict = accept(tree, fed[:, 1:], target[fed], generator)
        nodes = torch.tensor(list(zip_longest(*verdict.paths, fillvalue=-1)), dtype=torch.int64).view(-1, len(last)).T
        emitted = torch.where(nodes >= 0, fed.gather(1, nodes + 1), -1)
        emitted = torch.nn.functional.pad(emitted, (0, 1), value=-1)
        return emitted.scatter(1, (nodes >= 0).sum(1, keepdim=True), verdict.next_token[:, None])

    return call


TREES = {
    "hand": TREE,
    "wide": DraftTree((0, 0, 0, 0)),
    "chain": DraftTree.chain(2),
    "odd order": DraftTree((0, 1, 0, 3)),
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("against", [False, True])
def test_what_a_tree_emits_has_the_targets_distribution(shape: str, against: bool) -> None:
    """For likely drafts and for unlikely ones, jointly over three tokens."""
    target = transitions(1)
    draft = 1 - target if against else transitions(7)
    tokens = three_tokens(tree_call(TREES[shape], target, draft))
    assert len(tokens) >= 100_000
    assert chi_square_p_value(counted(tokens, VOCAB), joint(target)) > ENOUGH


def test_the_proof_would_see_a_node_that_is_off_by_one() -> None:
    """Each node's distribution read from the node before it."""
    target = transitions(1)

    def late(tree: DraftTree, drafts: torch.Tensor, p: torch.Tensor, generator: torch.Generator) -> TreeVerdict:
        return accept_tree(tree, drafts, p.roll(1, 1), generator)

    tokens = three_tokens(tree_call(TREE, target, transitions(7), late))
    assert chi_square_p_value(counted(tokens, VOCAB), joint(target)) < 1e-30


def test_one_draw_is_the_rule_tried_child_by_child() -> None:
    """Child 1 with p(x1); then p without x1, scaled up; and so on: the probability of each child, and of none."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    drafts = [1, 0, 3]
    left, reached, expected = p.double().clone(), 1.0, []
    for token in drafts:
        expected.append(reached * float(left[token]))
        reached *= 1 - float(left[token])
        left[token] = 0.0
        left /= left.sum()
    verdict = accept_tree(
        DraftTree((0, 0, 0)),
        torch.tensor(drafts).expand(DRAWS, 3),
        p.expand(DRAWS, 4, 4),
        torch.Generator().manual_seed(0),
    )
    first = torch.tensor([path[0] if path else 3 for path in verdict.paths])
    assert chi_square_p_value(torch.bincount(first), torch.tensor([*expected, reached])) > ENOUGH
    assert bool((verdict.next_token[first == 3] == 2).all())  # what no child has


IDS, P = torch.zeros(2, 8, dtype=torch.int64), torch.full((2, 9, 5), 0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS[:, :7], P), "drafts: got '7 tokens a row'; takes 8"),
        ((IDS, P[:, :8], torch.Generator()), "p: got 'shape"),
        ((IDS, P), "generator: got None"),
        ((IDS, IDS), r"p: got 'shape \(2, 8\)'"),
        ((IDS, P * torch.nan, torch.Generator()), "p: got 'probabilities that do not sum to 1"),
        ((IDS, P * 7, torch.Generator()), "p: got 'probabilities that do not sum to 1"),
        ((IDS, P * torch.tensor([-1.0, 3, 1, 1, 1]), torch.Generator()), "p: got 'probabilities that do not sum to 1"),
        ((IDS, None), "p: got 'NoneType'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accept_tree(TREE, *arguments)
