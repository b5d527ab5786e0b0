"""`Decoder` on a GPU: the CUDA graph computes what the eager step computes, and the time and memory add up."""

import copy
import statistics

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit.engine import Decoder, op_times
from labkit.measure import compare_ops, time_op
from labkit.models import tiny_model
from labkit.sizing import weight_bytes

pytestmark = pytest.mark.gpu

# Wide enough that a step is bound by reading its weights, and small enough to make in a second.
_WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_WIDE |= {"head_dim": 128, "num_hidden_layers": 4, "vocab_size": 32000}


@pytest.fixture(scope="module")
def model(device: torch.device) -> object:
    return tiny_model(max_position_embeddings=1024).to(device)


@pytest.fixture(scope="module")
def wide_model(device: torch.device) -> object:
    if device.type != "cuda":
        return tiny_model()
    with device:  # a billion random numbers are made there in no time
        return LlamaForCausalLM(LlamaConfig(**_WIDE)).eval().to(torch.bfloat16)


def both(model: object) -> tuple[Decoder, Decoder]:
    """A decoder as it comes, which on a GPU replays a CUDA graph, and one that never does."""
    return Decoder(model), Decoder(model, cuda_graph=False)


def random_tokens(model: object, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, shape, generator=generator).to(model.device)


def step_logits(decoder: Decoder, prompt: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Logits after the prompt, then token by token, `(batch, 1 + following, vocab)`."""
    decoder.reset()
    rows = [decoder.forward(prompt, logits_to_keep=1)]
    # All are held until the end: a step must not write over the logits of the one before it.
    rows += [decoder.forward(token, logits_to_keep=1) for token in following.split(1, dim=1)]
    return torch.cat(rows, dim=1)


# 250 + 20 passes the end of a graph's bucket of 256 slots.
@pytest.mark.parametrize("batch, prompt, new", [(1, 1, 24), (1, 250, 20), (3, 17, 24)])
def test_greedy_tokens_are_the_eager_steps_and_transformers(model: object, batch: int, prompt: int, new: int) -> None:
    input_ids = random_tokens(model, batch, prompt)
    graph, eager = (decoder.generate(input_ids, max_new_tokens=new).sequences for decoder in both(model))
    asked = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    theirs = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **asked)
    assert torch.equal(graph, eager)
    assert torch.equal(graph, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_every_step_err_no_more_than_the_eager_ones(device: torch.device, dtype: torch.dtype) -> None:
    model = tiny_model().to(device, dtype)
    exact_model = copy.deepcopy(model).double()
    prompt, following = random_tokens(model, 2, 9), random_tokens(model, 2, 12, seed=1)
    exact = step_logits(Decoder(exact_model, cuda_graph=False), prompt, following)
    graph, eager = ((step_logits(d, prompt, following).double() - exact).norm() / exact.norm() for d in both(model))
    assert graph <= 2 * eager + 1e-6
    # One step's logits are no other's, or a graph that repeats itself would pass.
    assert (exact[:, 1:] - exact[:, :-1]).norm() / exact.norm() > 10 * eager


def test_a_graph_follows_crop_reset_and_growth(model: object) -> None:
    graph, eager = both(model)
    for prompt_length, new, keep in ((12, 6, 14), (200, 80, 150), (40, 4, 1)):
        prompt = random_tokens(model, 1, prompt_length, seed=prompt_length)
        sequences = [decoder.generate(prompt, max_new_tokens=new).sequences for decoder in (graph, eager)]
        assert torch.equal(*sequences)
        following = random_tokens(model, 1, 4, seed=new)
        logits = []
        for decoder in (graph, eager):
            decoder.crop(keep)
            logits.append([decoder.forward(token) for token in following.split(1, dim=1)])
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


# 246 + several chunks passes the end of a graph's bucket of 256 slots, once within a chunk.
@pytest.mark.parametrize("batch, prompt", [(1, 9), (3, 246)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tokens_from_a_graph_err_no_more_than_the_eager_ones(
    device: torch.device, batch: int, prompt: int, dtype: torch.dtype
) -> None:
    model = tiny_model(max_position_embeddings=1024).to(device, dtype)
    exact_model = copy.deepcopy(model).double()
    first, following = random_tokens(model, batch, prompt), random_tokens(model, batch, 46, seed=1)
    results = []
    for decoder in (Decoder(exact_model, cuda_graph=False), *both(model)):
        decoder.forward(first)
        # All are held until the end: a step must not write over the results of the one before it.
        steps = [decoder.forward(c, return_hidden=True) for c in following.split([5, 1, 2, 5, 16, 5, 1, 11], dim=1)]
        assert decoder.length == prompt + 46
        results.append([torch.cat(parts, dim=1).double() for parts in zip(*steps, strict=True)])
    for exact, graph, eager in zip(*results, strict=True):
        off_graph, off_eager = ((x - exact).norm() / exact.norm() for x in (graph, eager))
        assert off_graph <= 2 * off_eager + 1e-6
        assert (exact[:, 1:] - exact[:, :-1]).norm() / exact.norm() > 10 * off_eager


def test_a_graph_keeps_the_logits_asked_for(model: object) -> None:
    graph, eager = both(model)
    tokens = random_tokens(model, 2, 6, seed=3)
    for decoder in (graph, eager):
        decoder.forward(random_tokens(model, 2, 20))
    for kept in (1, 3, 6, None):
        logits = []
        for decoder in (graph, eager):
            alone = decoder.forward(tokens, logits_to_keep=kept)
            decoder.crop(20)
            with_hidden, hidden = decoder.forward(tokens, logits_to_keep=kept, return_hidden=True)
            decoder.crop(20)
            assert alone.shape[1] == (kept or 6) and hidden.shape[1] == 6
            torch.testing.assert_close(alone, with_hidden)
            logits.append((alone, hidden))
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_steps_of_several_tokens_replay_a_graph_each(model: object, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("a CPU has no graph")
    decoder = Decoder(model)
    decoder.forward(random_tokens(model, 1, 20))
    for q_len in (1, 2, 16, 2, 17):
        decoder.forward(random_tokens(model, 1, q_len), return_hidden=True)
    chain = torch.ones(3, 3, dtype=torch.bool, device=device).tril()
    decoder.forward(random_tokens(model, 1, 3), tree_mask=chain)
    assert sorted(q_len for q_len, _ in decoder._graphs._graphs) == [1, 2, 16]


def test_rows_of_different_lengths_between_graphs(model: object) -> None:
    """Drafts rejected by row: eager steps while rows differ, a graph again once they do not."""
    graph, eager = both(model)
    prompt, draft, token = random_tokens(model, 3, 30), random_tokens(model, 3, 4, seed=1), random_tokens(model, 3, 1)
    results = []
    for decoder in (graph, eager):
        decoder.forward(prompt)
        decoder.forward(draft)
        decoder.crop([31, 34, 32])
        ragged = decoder.forward(draft, return_hidden=True)
        assert decoder.lengths == [35, 38, 36]
        decoder.crop([33, 33, 33])
        results.append((*ragged, decoder.forward(token), decoder.forward(draft)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    for row, length in enumerate((31, 34, 32)):
        alone = Decoder(model)
        alone.forward(torch.cat((prompt, draft), dim=1)[row : row + 1, :length])
        torch.testing.assert_close(
            results[0][0][row : row + 1], alone.forward(draft[row : row + 1]), rtol=1e-4, atol=1e-4
        )


def test_a_path_kept_of_a_tree_goes_on_from_a_graph(model: object) -> None:
    # 0 has children 1 and 2, and 2 has child 3.
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    prompt, tree, after = (random_tokens(model, 1, n, seed=n) for n in (30, 4, 3))
    graph, plain = both(model)
    graph.forward(prompt)
    graph.forward(tree, tree_mask=mask)
    graph.keep(30, [[0, 2, 3]])
    plain.forward(prompt)
    plain.forward(tree[:, [0, 2, 3]])
    torch.testing.assert_close(graph.forward(after), plain.forward(after), rtol=1e-4, atol=1e-4)


def test_a_seed_draws_the_same_tokens_from_a_graph(model: object) -> None:
    prompt = random_tokens(model, 1, 8)
    asked = {"max_new_tokens": 32, "temperature": 0.8, "top_k": 20, "top_p": 0.95}
    graph, eager = both(model)
    drawn = [decoder.generate(prompt, seed=7, **asked).sequences for decoder in (graph, eager, graph)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], graph.generate(prompt, seed=8, **asked).sequences)


@pytest.mark.parametrize("q_len", [1, 5])
def test_a_graph_is_faster_where_launches_bind(model: object, device: torch.device, q_len: int) -> None:
    if device.type != "cuda":
        pytest.skip("a CPU has no graph")
    decoders = dict(zip(("graph", "eager"), both(model), strict=True))
    tokens = random_tokens(model, 1, q_len)

    def step(decoder: Decoder) -> None:
        decoder.forward(tokens)
        decoder.crop(32)

    for decoder in decoders.values():
        decoder.fill_cache(1, 32)
    timings = compare_ops({name: lambda d=d: step(d) for name, d in decoders.items()}, device=device)
    assert timings["eager"].median > 1.5 * timings["graph"].median


def test_op_times_add_up_to_the_step(wide_model: object, device: torch.device) -> None:
    graph, eager = both(wide_model)
    token = random_tokens(wide_model, 1, 1)
    for decoder in (graph, eager):
        decoder.fill_cache(1, 64)

    def step() -> None:
        graph.forward(token, logits_to_keep=1)
        graph.crop(64)

    # On a GPU the ops are queued ahead, so that their sum is held against the graph, which has no launch gaps either.
    # In turns: what else runs on the machine slows one round, not the middle one of five.
    shares = []
    for _ in range(5):
        whole = time_op(step, device=device, min_run_s=0.05).median
        shares.append(sum(timing.median for timing in op_times(eager, token, repeats=9).values()) / whole)
    assert 0.6 < statistics.median(shares) < 1.7, shares
    assert eager.length == 64


def test_peak_memory_is_weights_cache_and_little_more(wide_model: object, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("on a CPU this is the whole process's")
    decoder = Decoder(wide_model)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    peak = decoder.generate(random_tokens(wide_model, 1, 64), max_new_tokens=64).peak_bytes
    weights = weight_bytes(wide_model.config, torch.bfloat16)
    assert before >= weights
    assert decoder.cache.nbytes <= peak - before <= decoder.cache.nbytes + 0.1 * weights
