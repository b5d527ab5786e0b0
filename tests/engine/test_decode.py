"""Decoder: the same tokens and logits as `transformers`, from a cache that can be cropped and branched."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.streamers import BaseStreamer

from labkit.corpora import load_text, token_batches
from labkit.engine import Decoder, StaticKVCache, op_times
from labkit.models import LoadedModel, tiny_model

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 600,
}


def family(name: str) -> torch.nn.Module:
    """A small random model of a family, or of a number of KV heads."""
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"hidden_size": 48})).eval()
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    if name == "llama3-rope":
        rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        return tiny_model(**SHAPE, rope_parameters=rope)
    heads = {"mha": 4, "gqa": 2, "mqa": 1}[name]
    return tiny_model(**SHAPE | {"num_key_value_heads": heads})


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return family("gqa")


def random_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 128, (batch, length))


@pytest.mark.parametrize("name", ["mha", "gqa", "mqa", "qwen2", "qwen3", "llama3-rope"])
@pytest.mark.parametrize("batch", [1, 3])
@torch.inference_mode()
def test_logits_and_hidden_states_are_those_of_transformers(name: str, batch: int) -> None:
    reference = family(name)
    tokens = random_tokens(batch, 40)
    expected = reference(tokens, output_hidden_states=True)
    decoder, logits, hidden = Decoder(reference), [], []
    # Prefill, single steps, and several tokens on top of a past.
    for chunk in tokens.split([17, 1, 1, 1, 20], dim=1):
        out = decoder.forward(chunk, return_hidden=True)
        logits.append(out[0])
        hidden.append(out[1])
    torch.testing.assert_close(torch.cat(logits, 1), expected.logits, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(torch.cat(hidden, 1), expected.hidden_states[-1], rtol=1e-4, atol=2e-5)
    assert decoder.length == 40


@pytest.fixture(scope="module")
def prompts(default_model: LoadedModel) -> list[torch.Tensor]:
    """20 stretches of the evaluation text, of 1 to 400 tokens."""
    text = token_batches(default_model.tokenizer, load_text("pydoc", "eval"), 20, 400, seed=7)
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 64, 89, 100, 128, 144, 200, 233, 256, 300, 377, 400]
    return [row[None, :length] for row, length in zip(text, lengths, strict=True)]


def test_greedy_tokens_are_those_of_transformers(default_model: LoadedModel, prompts: list[torch.Tensor]) -> None:
    decoder = Decoder(default_model)
    for prompt in prompts:
        expected = default_model.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
        )
        got = decoder.generate(prompt, max_new_tokens=16, eos_token_id=default_model.tokenizer.eos_token_id)
        assert got.sequences.tolist() == expected.tolist(), f"prompt of {prompt.shape[1]} tokens"


def test_a_batch_makes_what_its_rows_make_alone(model: torch.nn.Module) -> None:
    prompts = random_tokens(3, 9)
    together = Decoder(model).generate(prompts, max_new_tokens=12).sequences
    alone = [Decoder(model).generate(row[None], max_new_tokens=12).sequences[0] for row in prompts]
    assert together.tolist() == torch.stack(alone).tolist()


def test_crop_goes_back_as_if_nothing_had_come(model: torch.nn.Module) -> None:
    tokens, other = random_tokens(2, 30), random_tokens(2, 8)
    decoder = Decoder(model)
    decoder.forward(tokens[:, :20])
    expected = decoder.forward(tokens[:, 20:])
    decoder.crop(20)
    decoder.forward(other)
    decoder.crop(20)
    torch.testing.assert_close(decoder.forward(tokens[:, 20:]), expected)
    for wrong in (-1, 31, 2.0):
        with pytest.raises(ValueError, match="length: got"):
            decoder.crop(wrong)


def test_a_tree_is_each_of_its_paths(model: torch.nn.Module) -> None:
    past = random_tokens(1, 11)
    # 0 has children 1 and 2; 1 has child 3; 2 has children 4 and 5.
    parents = [-1, 0, 0, 1, 2, 2]
    tree = random_tokens(1, len(parents))
    paths = []
    for node, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else []) + [node])
    mask = torch.zeros(6, 6, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    decoder = Decoder(model)
    decoder.forward(past)
    logits, hidden = decoder.forward(tree, tree_mask=mask, return_hidden=True)
    for node, path in enumerate(paths):
        alone = Decoder(model)
        alone.forward(past)
        expected, expected_hidden = alone.forward(tree[:, path], return_hidden=True)
        torch.testing.assert_close(logits[:, node], expected[:, -1], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(hidden[:, node], expected_hidden[:, -1], rtol=1e-4, atol=2e-5)
    # A chain is the plain causal case.
    decoder.crop(11)
    chain = decoder.forward(tree, tree_mask=torch.ones(6, 6, dtype=torch.bool).tril())
    decoder.crop(11)
    torch.testing.assert_close(chain, decoder.forward(tree))


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (torch.ones(3, 3), "tree_mask: got 'torch.float32'"),
        (torch.ones(2, 3, dtype=torch.bool), r"shape \(2, 3\)"),
        (torch.ones(3, 3, dtype=torch.bool), "sees a later one"),
        (torch.zeros(3, 3, dtype=torch.bool), "diagonal"),
        (torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool(), "ancestors' ancestors"),
    ],
)
def test_a_mask_that_is_no_tree_is_refused(model: torch.nn.Module, mask: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Decoder(model).forward(random_tokens(1, 3), tree_mask=mask)


class Recorder(BaseStreamer):
    """Keeps what a streamer is fed."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.fed.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_the_streamer_is_fed_as_transformers_feeds_it(model: torch.nn.Module) -> None:
    ours, theirs, prompt = Recorder(), Recorder(), random_tokens(1, 7)
    Decoder(model).generate(prompt, max_new_tokens=5, streamer=ours)
    mask = torch.ones_like(prompt)
    model.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, streamer=theirs)
    assert ours.fed == theirs.fed and ours.ended and theirs.ended


def test_it_stops_on_eos_and_pads_rows_that_stopped_earlier(model: torch.nn.Module) -> None:
    prompts = random_tokens(3, 5)
    free = Decoder(model).generate(prompts, max_new_tokens=20).sequences[:, 5:].tolist()
    eos = free[0][3]
    ends = [row.index(eos) if eos in row else 20 for row in free]
    result = Decoder(model).generate(prompts, max_new_tokens=20, eos_token_id=[eos])
    new = result.sequences[:, 5:].tolist()
    assert len(new[0]) == min(20, max(ends) + 1)
    for row, expected, end in zip(new, free, ends, strict=True):
        assert row[: end + 1] == expected[: end + 1] and set(row[end + 1 :]) <= {eos}


def test_a_seed_repeats_and_the_global_generator_is_left_alone(model: torch.nn.Module) -> None:
    prompt, decoder = random_tokens(1, 5), Decoder(model)
    state = torch.get_rng_state()
    draw = {"max_new_tokens": 20, "temperature": 1.5, "top_k": 50, "top_p": 0.95}
    first, again, other = (decoder.generate(prompt, seed=s, **draw).sequences.tolist() for s in (1, 1, 2))
    assert first == again != other
    assert decoder.generate(prompt, **draw).sequences.tolist() != decoder.generate(prompt, **draw).sequences.tolist()
    assert torch.equal(state, torch.get_rng_state())


def test_the_result_s_figures_hold_together(model: torch.nn.Module) -> None:
    result = Decoder(model).generate(random_tokens(2, 6), max_new_tokens=10)
    total = result.ttft_s + 9 * result.tpot_s
    assert result.tokens_per_second == pytest.approx(2 * 10 / total)
    assert result.ttft_s > 0 < result.tpot_s and (result.peak_bytes is None or result.peak_bytes > 1e6)


def test_the_cache_holds_what_transformers_holds(model: torch.nn.Module) -> None:
    tokens, theirs = random_tokens(2, 13), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(tokens, past_key_values=theirs)
    decoder = Decoder(model)
    decoder.forward(tokens)
    for idx, layer in enumerate(theirs.layers):
        torch.testing.assert_close(decoder.cache.keys[idx, :, :, :13], layer.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decoder.cache.values[idx, :, :, :13], layer.values, rtol=1e-4, atol=1e-5)
    rows = 2 * decoder.cache.max_length
    assert decoder.cache.nbytes == 2 * 2 * 2 * 12 * 4 * rows  # K and V, layers, KV heads, head_dim, bytes


def test_the_cache_grows_and_keeps_what_it_holds(model: torch.nn.Module) -> None:
    tokens = random_tokens(1, 300)
    decoder = Decoder(model)
    decoder.forward(tokens[:, :250])
    small = decoder.cache.max_length
    grown = decoder.forward(tokens[:, 250:])
    assert decoder.cache.max_length > small
    whole = Decoder(model).forward(tokens)
    torch.testing.assert_close(grown, whole[:, 250:], rtol=1e-4, atol=2e-5)


def test_a_given_cache_is_used(model: torch.nn.Module) -> None:
    cache = StaticKVCache(model.config, 1, 64, dtype=torch.float32, device=torch.device("cpu"))
    decoder = Decoder(model, cache=cache)
    decoder.forward(random_tokens(1, 10))
    assert decoder.cache is cache and cache.length == 10 and bool(cache.keys[:, :, :, :10].any())


def test_what_a_step_allocated_can_be_written_to_outside_of_one(model: torch.nn.Module) -> None:
    decoder = Decoder(model)
    decoder.forward(random_tokens(1, 10))
    decoder.fill_cache(1, 20)
    decoder.forward(random_tokens(1, 300))  # grows
    decoder.fill_cache(1, 5)
    decoder.cache.keys.zero_()
    assert decoder.length == 5


def test_fill_cache_stands_at_a_length(model: torch.nn.Module) -> None:
    decoder = Decoder(model)
    decoder.fill_cache(2, 300)
    assert decoder.length == 300 and decoder.forward(random_tokens(2, 1)).shape == (2, 1, 128)


def a_cache(dtype: torch.dtype = torch.float32, **changes: int) -> StaticKVCache:
    """A cache for the model, or for one that differs from it."""
    return StaticKVCache(LlamaConfig(**SHAPE | changes), 1, 16, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda d: d.forward(torch.zeros(1, 0, dtype=torch.long)), "tokens: got .*at least one token"),
        (lambda d: d.forward(torch.zeros(3)), "tokens: got .*2 dimensions"),
        (lambda d: d.forward(torch.full((1, 2), 128)), "tokens: got 'ids 128 to 128'; takes 0 to 127"),
        (lambda d: d.forward(random_tokens(1, 3), logits_to_keep=4), "logits_to_keep: got 4"),
        (lambda d: d.forward(random_tokens(1, 601)), "max_length: got 601; takes an integer from 1 to 600"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=0), "max_new_tokens: got 0"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=598), "max_new_tokens: got 598; .*from 1 to 597"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=2, eos_token_id=128), "eos_token_id: got 128; .*127"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=2, seed=2**64), "seed: got 18446744073709551616"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=2, temperature=float("inf")), "temperature: got inf"),
        (lambda d: d.generate(torch.zeros(3), max_new_tokens=2), "input_ids: got"),
        (lambda d: d.fill_cache(1, None), "length: got None"),
        (lambda d: Decoder(d.model.model), "model: got 'LlamaModel'; takes a causal LM"),
        (lambda d: Decoder(tiny_model().to("meta")), "model: got 'weights on meta'"),
        (lambda d: a_cache().grown(3), "max_length: got 3; takes an integer of at least 16"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=2, eos_token_id=[]), "eos_token_id: got"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=2, seed=-1), "seed: got -1"),
        (lambda d: (d.forward(random_tokens(2, 3)), d.forward(random_tokens(1, 1))), "tokens: got '1 rows'; takes 2"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=2, eos_token_id=1.5), "eos_token_id: got 1.5"),
        (lambda d: d.generate(random_tokens(1, 3), max_new_tokens=2, streamer=print), "streamer: got"),
        (lambda d: Decoder(d.model, cache="static"), "cache: got 'str'"),
        (lambda d: Decoder(d.model, cache=a_cache(num_hidden_layers=3)), r"cache: got 'keys \(3, .*takes keys \(2, "),
        (lambda d: Decoder(d.model, cache=a_cache(torch.bfloat16)), "cache: got .*bfloat16.*takes .*float32"),
        (lambda d: op_times(d.model, random_tokens(1, 1)), "decoder: got"),
        (lambda d: Decoder(d.model, cuda_graph=True), "cuda_graph: got True"),
        (lambda d: Decoder("gpt2"), "model: got 'str'"),
    ],
)
def test_refusals(model: torch.nn.Module, call: object, why: str) -> None:
    if torch.cuda.is_available() and "cuda_graph" in why:
        pytest.skip("a model on the CPU beside a GPU is refused for its own device")
    with pytest.raises(ValueError, match=why):
        call(Decoder(model))


def test_what_generate_refuses_leaves_the_cache_as_it_was(model: torch.nn.Module) -> None:
    decoder = Decoder(model)
    decoder.forward(random_tokens(1, 9))
    for wrong in ({"eos_token_id": 128}, {"seed": -1}, {"max_new_tokens": 0}, {"top_k": -1}):
        with pytest.raises(ValueError):
            decoder.generate(random_tokens(1, 3), **{"max_new_tokens": 2} | wrong)
    assert decoder.length == 9


def test_threads_that_share_a_decoder_take_turns(model: torch.nn.Module) -> None:
    prompts = [random_tokens(1, 12) for _ in range(4)]
    alone = [Decoder(model).generate(prompt, max_new_tokens=30).sequences for prompt in prompts]
    shared = Decoder(model)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: shared.generate(prompt, max_new_tokens=30).sequences, prompts * 3))
    assert all(torch.equal(a, b) for a, b in zip(alone * 3, together, strict=True))


def test_after_an_interrupt_the_next_call_starts_anew(model: torch.nn.Module) -> None:
    class Stop(BaseStreamer):
        steps = 0

        def put(self, value: torch.Tensor) -> None:
            self.steps += 1
            if self.steps == 3:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    decoder, prompt = Decoder(model), random_tokens(1, 5)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(prompt, max_new_tokens=8, streamer=Stop())
    again = decoder.generate(prompt, max_new_tokens=8).sequences
    assert torch.equal(again, Decoder(model).generate(prompt, max_new_tokens=8).sequences)


def test_a_model_this_step_does_not_compute_is_refused() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        Decoder(tiny_model(**SHAPE, rope_parameters=dynamic))
    with pytest.raises(ValueError, match="hidden_act 'gelu'"):
        Decoder(tiny_model(**SHAPE, hidden_act="gelu"))


def test_a_cache_that_does_not_fit_is_refused_with_its_bytes(model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"max_length: got .* takes at most \d+: the KV cache would need .* GB"):
        StaticKVCache(model.config, 1000, 10**9, dtype=torch.float32, device=torch.device("cpu"))
