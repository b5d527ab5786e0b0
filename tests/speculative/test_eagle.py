"""`EagleHead`: what it drafts is what its network says, chains and trees, one row and many."""

import pytest
import torch
import torch.nn.functional as F

from labkit.engine import Decoder
from labkit.kv_cache import PagedKVCache
from labkit.models import tiny_model
from labkit.quantization import RTNConfig, quantize_
from labkit.quantization.rtn import round_to_nearest
from labkit.speculative import DraftTree, EagleHead, Sampling, generate
from labkit.speculative.eagle_file import load_model_file, save_model_file
from tests.speculative.distribution import chi_square_p_value, counted
from tests.speculative.heads import head_for
from tests.speculative.test_decode import TINY, drawn, five_tokens  # noqa: F401  (a fixture)

VOCAB, NEW = 256, 20
TREE = DraftTree.of_ranks([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(3))


def told(head, model, rows, kept=None, sampling=None, seed=0):
    """The head after `begin` and one `observe` of the target's hidden states of all of `rows` but the last tokens."""
    decoder = Decoder(model)
    sampling = sampling or Sampling()
    head.begin(decoder, rows[:, :-1], sampling, torch.Generator().manual_seed(seed))
    _, hidden = decoder.forward(rows[:, :-1], return_hidden=True)
    head.observe(hidden, [rows.shape[1] - 1] * len(rows))
    return hidden


@torch.no_grad()
def said(network, model, rows, drafted, hidden):
    """By the training form: logits `(batch, n, draft vocabulary)` of each of `drafted`'s places after `rows`."""
    steps = drafted.shape[1]
    embedding = model.get_input_embeddings().weight
    tokens = torch.cat((rows, drafted), 1)
    length = rows.shape[1] - 1
    embedded = [F.embedding(tokens[:, 1 + step : 1 + step + length], embedding) for step in range(steps)]
    features = network.unrolled(embedded, hidden, network.rotary_table(length + steps))
    output = model.get_output_embeddings().weight[network.draft_ids.long()]
    return torch.stack([feature[:, -1] @ output.T for feature in features], 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_chain_is_what_the_training_form_says(model, prompts, rows):
    """All that a draft reads, its own answers included, is where the training put it."""
    network = head_for(model)
    head, ids = EagleHead(network), prompts[:rows]
    hidden = told(head, model, ids)
    drafted = head.propose(ids.tolist(), 4).tokens
    logits = said(network, model, ids, drafted, hidden)
    assert torch.equal(logits.argmax(-1), drafted)
    assert len(drafted.unique()) > 2


def test_a_chain_says_what_it_drew_from(model, prompts):
    network = head_for(model, torch.arange(0, VOCAB, 3))
    head, sampling = EagleHead(network), Sampling(temperature=0.8, top_k=20)
    hidden = told(head, model, prompts, sampling=sampling)
    proposal = head.propose(prompts.tolist(), 3)
    logits = said(network, model, prompts, proposal.tokens, hidden)
    own = head._ops.vocabulary.ids
    output = model.get_output_embeddings().weight
    # The text's own tokens stand after the static ones.
    assert torch.equal(own[: len(network.draft_ids)], network.draft_ids.long())
    assert set(own.tolist()) == set(network.draft_ids.tolist()) | set(prompts.flatten().tolist())
    assert proposal.probs.shape == (3, 3, VOCAB)
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(3, 3))
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[own] = False
    assert not proposal.probs[..., outside].any()
    assert bool((proposal.probs.gather(-1, proposal.tokens[..., None]) > 0).all())
    first = logits[:, 0].new_zeros(3, VOCAB).fill_(-torch.inf)
    first[:, network.draft_ids.long()] = logits[:, 0]
    extra = [i for i in own.tolist() if i not in set(network.draft_ids.tolist())]
    feature_logits = head_logits(network, model, prompts, hidden) @ output[extra].T
    first[:, extra] = feature_logits
    torch.testing.assert_close(proposal.probs[:, 0], sampling.probabilities(first), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def head_logits(network, model, rows, hidden):
    """The feature `(batch, hidden_size)` at the last place, by the training form."""
    embedded = F.embedding(rows[:, 1:], model.get_input_embeddings().weight)
    return network.unrolled([embedded], hidden, network.rotary_table(rows.shape[1]))[0][:, -1]


def test_a_tree_of_one_child_each_is_the_greedy_chain(model, prompts):
    network = head_for(model)
    chain, tree = EagleHead(network), EagleHead(network, DraftTree.chain(4))
    for head in (chain, tree):
        told(head, model, prompts)
    assert torch.equal(tree.propose(prompts.tolist(), 4).tokens, chain.propose(prompts.tolist(), 4).tokens)


@pytest.mark.parametrize("rows", [1, 3])
def test_each_node_of_a_tree_is_as_likely_as_its_rank_says(model, prompts, rows):
    """Every path, fed alone to the training form, gives the node its rank among all tokens."""
    network, ids = head_for(model), prompts[:rows]
    head = EagleHead(network, TREE)
    hidden = told(head, model, ids)
    proposal = head.propose(ids.tolist(), 3)
    assert proposal.probs is None
    assert proposal.tree == TREE
    for node, (depth, rank) in enumerate(zip(TREE.depths, TREE.ranks, strict=True), 1):
        path = [node]
        while TREE.parents[path[0] - 1]:
            path.insert(0, TREE.parents[path[0] - 1])
        drafted = proposal.tokens[:, [place - 1 for place in path]]
        logits = said(network, model, ids, drafted, hidden)[:, depth - 1]
        ordered = logits.argsort(-1, descending=True)
        assert torch.equal(ordered[:, rank], drafted[:, -1]), (node, path)


def test_a_tree_is_cut_to_gamma(model, prompts):
    head = EagleHead(head_for(model), TREE)
    told(head, model, prompts)
    assert head.propose(prompts.tolist(), 2).tree == TREE.cut(2)


@pytest.mark.parametrize("tree", [None, TREE, DraftTree.chain(3)], ids=["chain", "tree", "chain as a tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_greedy_output_is_the_targets(prompts, tree, dtype, gamma):
    """A small vocabulary, so that a random head is right now and then, and rows accept different numbers."""
    model = tiny_model(vocab_size=8, initializer_range=0.5).to(dtype)
    ids = prompts % 8
    head = EagleHead(head_for(model, torch.tensor([0, 1, 2, 5, 7]), seed=2), tree)
    calls = []
    out = generate(model, ids, head, max_new_tokens=NEW, num_assistant_tokens=gamma, watch=calls.append)
    assert torch.equal(out.sequences, Decoder(model).generate(ids, max_new_tokens=NEW).sequences)
    assert len({call.n_accepted for call in calls}) > 1


def test_hidden_states_reach_the_head_in_time(model, prompts):
    """What the head drafts inside of a generation is what a new one drafts from the whole row at once."""
    small = tiny_model(vocab_size=8, initializer_range=0.5)
    network, ids = head_for(small), prompts % 8

    class Watched(EagleHead):
        def propose(self, rows, n):
            proposal = super().propose(rows, n)
            for row, tokens in zip(rows, proposal.tokens, strict=True):
                if len(row) == ids.shape[1] + NEW:  # finished: whatever is drafted for it is dropped
                    continue
                fresh = EagleHead(network, self.tree)
                whole = torch.tensor([row])
                told(fresh, small, whole)
                assert torch.equal(fresh.propose([row], n).tokens[0], tokens)
                seen.append(tokens)
            return proposal

    for tree in (None, TREE):
        seen = []
        generate(small, ids, Watched(network, tree), max_new_tokens=NEW, num_assistant_tokens=3)
        assert len(seen) > 20


def test_a_prompt_that_lies_in_a_prefix_cache(prompts):
    small = tiny_model(vocab_size=8, initializer_range=0.5)
    ids = (prompts[:1] % 8).repeat(1, 5)
    cache = PagedKVCache(small.config, num_blocks=32, block_size=8, dtype=torch.float32)
    decoder, head = Decoder(small, cache=cache), EagleHead(head_for(small))
    first, again = (generate(decoder, ids, head, max_new_tokens=NEW, num_assistant_tokens=3) for _ in range(2))
    assert torch.equal(first.sequences, Decoder(small).generate(ids, max_new_tokens=NEW).sequences)
    assert torch.equal(first.sequences, again.sequences)
    assert head._skipped > 0


@pytest.mark.parametrize("tree", [None, DraftTree.of_ranks([(0,), (1,), (0, 0), (1, 0)])], ids=["chain", "tree"])
def test_sampled_output_has_the_targets_distribution(five_tokens, tree):  # noqa: F811
    model, ids, exact = five_tokens
    head = EagleHead(head_for(model, torch.tensor([0, 2, 3])), tree)
    counts = drawn(model, ids, head, 2)
    assert chi_square_p_value(counts, exact) > 1e-3
    assert counts.shape == (TINY,) * 3


def test_drafted_tokens_have_the_distribution_that_it_tells(prompts):
    model = tiny_model(vocab_size=8, initializer_range=0.5)
    rows = (prompts[:1] % 8).expand(4000, -1)
    head = EagleHead(head_for(model))
    told(head, model, rows, sampling=Sampling(temperature=1.0))
    proposal = head.propose(rows.tolist(), 1)
    counts = counted(proposal.tokens, 8)
    assert chi_square_p_value(counts, proposal.probs[0, 0]) > 1e-3


def test_a_file_brings_back_the_head(model, prompts, tmp_path):
    network = head_for(model, torch.arange(0, VOCAB, 2))
    save_model_file(network, tmp_path / "head.safetensors", torch.float32)
    loaded = EagleHead.load(tmp_path / "head.safetensors", tree=TREE)
    assert loaded.model.config == network.config
    for name, tensor in network.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    save_model_file(network, tmp_path / "half.safetensors")
    half = load_model_file(tmp_path / "half.safetensors")
    assert half.fuse.weight.dtype == torch.float32
    assert torch.equal(half.fuse.weight, network.fuse.weight.bfloat16().float())


def test_what_is_no_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="path"):
        EagleHead.load(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="path"):
        EagleHead.load(tmp_path / "text.safetensors")


def test_a_target_of_another_shape_is_refused(model, prompts):
    other = tiny_model(hidden_size=32)
    with pytest.raises(ValueError, match="hidden_size"):
        generate(other, prompts, EagleHead(head_for(model)), max_new_tokens=4, num_assistant_tokens=2)


def test_it_serves_one_target_after_another(model, prompts):
    """The output rows are the target's: a head that kept those of the last one would draft nonsense."""
    first, second = tiny_model(vocab_size=8), tiny_model(vocab_size=8, initializer_range=0.5)
    network, ids = head_for(first), prompts % 8
    head = EagleHead(network)
    drafts = []
    for target in (first, second, first):
        told(head, target, ids)
        drafts.append(head.propose(ids.tolist(), 3).tokens)
    assert torch.equal(drafts[0], drafts[2])
    alone = EagleHead(network)
    told(alone, second, ids)
    assert torch.equal(drafts[1], alone.propose(ids.tolist(), 3).tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_packed_target_has_a_packed_head(prompts, dtype, tree):
    """In float32 packed weights are multiplied exactly, so that the output is plain decoding's; in bfloat16 they run
    through the packed product, over several rows that feed different numbers."""
    target = tiny_model(vocab_size=64, initializer_range=0.5).to(dtype)
    quantize_(target, RTNConfig(bits=4, group_size=32), progress=False)
    head = EagleHead(head_for(target), tree)
    ids = prompts % 64
    out = generate(target, ids, head, max_new_tokens=NEW, num_assistant_tokens=3)
    assert out.sequences.shape == (3, ids.shape[1] + NEW)
    if dtype is torch.float32:
        assert torch.equal(out.sequences, Decoder(target).generate(ids, max_new_tokens=NEW).sequences)
    layer = head._ops.step.layers[0]
    x = torch.randn(2, 64).to(dtype)
    rounded = round_to_nearest(head.model.q_proj.weight.to(dtype), RTNConfig(bits=4, group_size=64))
    torch.testing.assert_close(layer.q_proj(x), x @ rounded.dequantize(dtype).T, atol=0.05, rtol=0.05)
