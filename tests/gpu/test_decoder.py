"""`Decoder` on a GPU: the CUDA graph computes what the eager step computes, and the time and memory add up."""

import copy

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


def test_a_seed_draws_the_same_tokens_from_a_graph(model: object) -> None:
    prompt = random_tokens(model, 1, 8)
    asked = {"max_new_tokens": 32, "temperature": 0.8, "top_k": 20, "top_p": 0.95}
    graph, eager = both(model)
    drawn = [decoder.generate(prompt, seed=7, **asked).sequences for decoder in (graph, eager, graph)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], graph.generate(prompt, seed=8, **asked).sequences)


def test_a_graph_is_faster_where_launches_bind(model: object, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("a CPU has no graph")
    decoders = dict(zip(("graph", "eager"), both(model), strict=True))
    token = random_tokens(model, 1, 1)

    def step(decoder: Decoder) -> None:
        decoder.forward(token)
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
    whole = time_op(step, device=device).median
    total = sum(timing.median for timing in op_times(eager, token, repeats=9).values())
    assert 0.6 * whole < total < 1.7 * whole
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
