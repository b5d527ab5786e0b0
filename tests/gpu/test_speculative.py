"""Speculative decoding on a GPU: the output is the target's, from chains and trees, in rows that part company, and
from a CUDA graph as from the eager step."""

import copy
import math

import pytest
import torch

from labkit.engine import Decoder
from labkit.models import tiny_model
from labkit.speculative import DraftModel, DraftTree, PromptLookup, Proposal, generate
from labkit.speculative.stats import Call

pytestmark = pytest.mark.gpu

PROMPT, NEW, VOCAB = 12, 40, 256
# Two candidates a level for two levels, then the first of them goes on.
TREE = DraftTree.of_ranks([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])


class Scripted:
    """Drafts each row's known continuation, and spoils the tokens at the positions that `wrong[row]` holds; with a
    tree, the last child of each level on the right path carries the continuation, the others do not."""

    wants_hidden = False

    def __init__(self, known: list[list[int]], wrong: list[set[int]], tree: DraftTree | None = None) -> None:
        self.known, self.wrong, self.tree = known, wrong, tree

    def begin(self, target: Decoder, input_ids: torch.Tensor, sampling: object, generator: object) -> None:
        self.device = input_ids.device

    def propose(self, rows: list[list[int]], n: int) -> Proposal:
        tree = DraftTree.chain(n) if self.tree is None else self.tree.cut(n)
        drafted = [self._row(index, len(row), tree) for index, row in enumerate(rows)]
        return Proposal(torch.tensor(drafted, device=self.device), tree=self.tree and tree)

    def _row(self, index: int, start: int, tree: DraftTree) -> list[int]:
        tokens, right = [], {0}
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True), 1):
            at = min(start + depth - 1, len(self.known[index]) - 1)
            fits = parent in right and node == tree.children(parent)[-1] and at not in self.wrong[index]
            right |= {node} if fits else set()
            # Siblings differ, as those that a draft model ranks do.
            tokens.append((self.known[index][at] + (0 if fits else node)) % VOCAB)
        return tokens

    def observe(self, hidden: torch.Tensor, kept: list[int]) -> None:
        raise AssertionError("it wants none")


@pytest.fixture(scope="module")
def model(device: torch.device) -> object:
    return tiny_model(max_position_embeddings=1024).to(device)


@pytest.fixture(scope="module")
def draft(model: object) -> object:
    """The target, off by enough to be wrong about some tokens and right about others."""
    near = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for weight in near.model.layers.parameters():
        noise = torch.randn(weight.shape, generator=generator) * 0.02
        weight.add_(noise.to(weight))
    return near


def random_tokens(model: object, rows: int, length: int = PROMPT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(model.config.vocab_size, (rows, length), generator=generator).to(model.device)


def plain(model: object, input_ids: torch.Tensor, new: int = NEW) -> torch.Tensor:
    return Decoder(model).generate(input_ids, max_new_tokens=new).sequences


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_a_draft_models_greedy_output_is_plain_decodings(model: object, draft: object, rows: int, gamma: int) -> None:
    input_ids = random_tokens(model, rows)
    asked = {"max_new_tokens": NEW, "num_assistant_tokens": gamma}
    output = generate(Decoder(model), input_ids, DraftModel(draft), **asked)
    assert torch.equal(output.sequences, plain(model, input_ids))
    assert 0 < output.stats.n_matches < output.stats.n_tested


@pytest.mark.parametrize("rows", [1, 2])
def test_prompt_lookups_greedy_output_is_plain_decodings(model: object, rows: int) -> None:
    # What the model says of a prompt, as part of a prompt: some of it comes again.
    input_ids = plain(model, random_tokens(model, rows), 120)
    output = generate(Decoder(model), input_ids, PromptLookup(), max_new_tokens=NEW, num_assistant_tokens=5)
    assert torch.equal(output.sequences, plain(model, input_ids))
    assert output.stats.n_drafted > 0


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_rows_that_accept_different_numbers_stay_the_targets(model: object, tree: DraftTree | None) -> None:
    input_ids = random_tokens(model, 3)
    expected = plain(model, input_ids)
    known = expected.tolist()
    wrong = [set(), set(range(0, PROMPT + NEW, 3)), set(range(PROMPT + NEW))]
    calls: dict[int, list[int]] = {row: [] for row in range(3)}
    proposer, target = Scripted(known, wrong, tree), Decoder(model)
    asked = {"max_new_tokens": NEW, "num_assistant_tokens": 3}

    def watch(call: Call) -> None:
        if call.kind != "prompt":
            calls[call.row].append(call.n_accepted)

    output = generate(target, input_ids, proposer, **asked, watch=watch)
    assert torch.equal(output.sequences, expected)
    # All of the depth of three that the row has room for, some of it, nothing.
    assert calls[0] == [3] * ((NEW - 1) // 4) + [(NEW - 1) % 4]
    assert set(calls[1][:-1]) == {0, 2} or set(calls[1][:-1]) == {2}
    assert set(calls[2]) == {0} and len(calls[2]) == NEW - 1


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_graph_verifies_what_the_eager_step_does(model: object, tree: DraftTree | None) -> None:
    input_ids = random_tokens(model, 1, 250)  # 250 + 40 passes the end of a graph's bucket of 256 slots
    expected = plain(model, input_ids)
    for cuda_graph in (None, False):
        proposer = Scripted(expected.tolist(), [set(range(0, 290, 7))], tree)
        target = Decoder(model, cuda_graph=cuda_graph)
        for _ in range(2):  # the second time over graphs that are there
            output = generate(target, input_ids, proposer, max_new_tokens=NEW, num_assistant_tokens=3)
            assert torch.equal(output.sequences, expected)


def test_sampled_tokens_have_the_targets_distribution(device: torch.device) -> None:
    vocab, temperature = 8, 2.5
    models = [tiny_model(vocab_size=vocab, initializer_range=r).to(device) for r in (0.1, 0.2)]
    rows = 20_000 if device.type == "cuda" else 3_000
    input_ids = random_tokens(models[0], 1, 5).expand(rows, -1).contiguous()
    asked = {"max_new_tokens": 3, "num_assistant_tokens": 3, "temperature": temperature, "seed": 3}
    output = generate(Decoder(models[0]), input_ids, DraftModel(models[1]), **asked)
    assert 0.2 < output.stats.acceptance_rate < 0.95, "neither sure nor hopeless, or the rule is not tested"

    first, second = output.sequences[:, -3:-1].unbind(1)  # the prompt's, and one that was drafted
    found = torch.bincount(first * vocab + second, minlength=vocab * vocab).double().cpu()
    after = torch.cat((input_ids[:vocab], torch.arange(vocab, device=device)[:, None]), dim=1)
    logits = models[0].double()(after).logits[:, -2:].cpu() / temperature
    joint = logits[0, 0].softmax(-1)[:, None] * logits[:, 1].softmax(-1)
    assert chi_square(found, rows * joint.flatten()) < limit(vocab * vocab - 1)
    # The draft's own distribution would not have passed.
    drafts = models[1].double()(after).logits[:, -2:].cpu() / temperature
    wrong = drafts[0, 0].softmax(-1)[:, None] * drafts[:, 1].softmax(-1)
    assert chi_square(found, rows * wrong.flatten()) > 3 * limit(vocab * vocab - 1)


def chi_square(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.min() > 5, "too few draws for a chi-square"
    return float(((found - expected) ** 2 / expected).sum())


def limit(degrees: int) -> float:
    """What a chi-square passes once in a hundred thousand times (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.265 * math.sqrt(spread)) ** 3
