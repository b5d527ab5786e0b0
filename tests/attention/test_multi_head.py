"""MultiHeadAttention against transformers' Llama layers and against the formula written out in float64."""

import copy
import math

import pytest
import torch
from transformers import AutoModel, DynamicCache, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from labkit._compat import quiet_profiler
from labkit.attention import MultiHeadAttention, Rotary, _context
from labkit.models import tiny_model
from tests.attention.watching import Made

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Cosine and sine come with a factor here.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}


def llama_layer(**overrides) -> tuple[LlamaAttention, LlamaRotaryEmbedding]:
    fields = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": True}
    config = LlamaConfig(**(fields | overrides))
    config._attn_implementation = "eager"
    layer = LlamaAttention(config, 0).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.4)
    return layer, LlamaRotaryEmbedding(config)


def llama_output(layer, rotary, x: torch.Tensor) -> torch.Tensor:
    """One full causal pass of the layer as transformers has it."""
    n = x.shape[1]
    mask = torch.full((n, n), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    return layer(x, rotary(x, torch.arange(n)[None]), mask)[0]


def reference(module: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    """`x (q_len, hidden_size)`: each head and each query by itself, in float64."""
    module, x = copy.deepcopy(module).double(), x.double()
    d, group = module.head_dim, module.num_attention_heads // module.num_key_value_heads
    theta = torch.tensor([10000.0 ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
    turn = torch.exp(1j * torch.arange(len(x))[:, None].double() * theta)
    rows = []
    for head in range(module.num_attention_heads):
        own, shared = slice(head * d, (head + 1) * d), slice(head // group * d, (head // group + 1) * d)
        q, k = (
            (x @ w[s].T)[:, : d // 2] + 1j * (x @ w[s].T)[:, d // 2 :]
            for w, s in ((module.q_proj.weight, own), (module.k_proj.weight, shared))
        )
        scores = ((q * turn) @ (k * turn).conj().T).real / math.sqrt(d)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        rows.append(scores.softmax(-1) @ (x @ module.v_proj.weight[shared].T))
    return torch.cat(rows, dim=-1) @ module.o_proj.weight.T


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_every_number_of_kv_heads_is_the_formula(kv_heads: int) -> None:
    module = MultiHeadAttention(30, 6, kv_heads, 8).double()
    x = torch.randn(2, 11, 30, dtype=torch.float64)
    expected = torch.stack([reference(module, row) for row in x])
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-7)
    assert module.k_proj.out_features == kv_heads * 8 and module.q_proj.out_features == 48


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("rope", [{"rope_theta": 500.0, "rope_type": "default"}, LLAMA3, YARN])
def test_weights_of_a_llama_layer_give_its_outputs(kv_heads: int, rope: dict) -> None:
    layer, rotary = llama_layer(num_key_value_heads=kv_heads, rope_parameters=rope)
    x = torch.randn(2, 100, 48)
    expected = llama_output(layer, rotary, x)
    for source in (rotary, layer.config):
        module = MultiHeadAttention.from_llama(layer, source)
        torch.testing.assert_close(module(x), expected, rtol=2e-4, atol=2e-5)
    assert module.q_proj.weight.data_ptr() != layer.q_proj.weight.data_ptr()


@pytest.mark.parametrize("chunks", [[1] * 13, [13], [1, 12], [5, 1, 7], [6, 6, 1]])
@pytest.mark.parametrize("make_cache", ["dynamic", "static"])
def test_a_cache_goes_on_from_its_past(chunks: list[int], make_cache: str) -> None:
    layer, rotary = llama_layer()
    module = MultiHeadAttention.from_llama(layer, rotary)
    x = torch.randn(2, 13, 48)
    expected = llama_output(layer, rotary, x)
    layers = LlamaConfig(num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, hidden_size=48)
    cache = DynamicCache() if make_cache == "dynamic" else StaticCache(layers, max_cache_len=20)
    got = torch.cat([module(part, past_key_values=cache, layer_idx=3) for part in x.split(chunks, 1)], dim=1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length(3) == 13
    assert cache.layers[3].keys.shape[1] == 2, "the cache holds the KV heads, not one for each query head"


def test_it_stands_in_for_the_layers_of_a_model_in_generate() -> None:
    model = tiny_model(num_hidden_layers=3)
    prompt = torch.randint(0, 256, (2, 9))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    expected = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)

    class Shell(torch.nn.Module):
        def __init__(self, inner: MultiHeadAttention) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states, past_key_values=None, **_):
            past = past_key_values.get_seq_length(self.inner.layer_idx)
            seen = torch.cat((mask, mask.new_ones(2, 20)), 1)[:, : past + hidden_states.shape[1]]
            return self.inner(hidden_states, attention_mask=seen, past_key_values=past_key_values), None

    for layer in model.model.layers:
        layer.self_attn = Shell(MultiHeadAttention.from_llama(layer.self_attn, model.model.rotary_emb))
    got = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_left_padding_changes_no_row_and_a_blind_query_gives_zeros(dtype: torch.dtype) -> None:
    module = MultiHeadAttention(48, 6, 2)
    rows = [torch.randn(1, n, 48) for n in (9, 4, 7)]
    padded = torch.cat([torch.cat((torch.randn(1, 9 - r.shape[1], 48), r), 1) for r in rows])
    mask = torch.stack([torch.arange(9) >= 9 - r.shape[1] for r in rows]).to(dtype)
    cache = DynamicCache()
    first = module(padded[:, :6], attention_mask=mask[:, :6], past_key_values=cache)
    last = [module(padded[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache) for i in range(6, 9)]
    for got in (module(padded, attention_mask=mask), torch.cat((first, *last), 1)):
        assert not got.isnan().any()
        for index, row in enumerate(rows):
            n = row.shape[1]
            torch.testing.assert_close(got[index, 9 - n :], module(row)[0], rtol=1e-4, atol=1e-5)
            assert (got[index, : 9 - n] == 0).all()
    # A single query that sees nothing, on the path that decoding takes.
    blind = module(padded[:, :1], attention_mask=torch.tensor([[1], [0], [0]]).to(dtype))
    assert (blind[1:] == 0).all() and (blind[0] != 0).any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("past", [0, 5])
def test_grouped_rows_give_what_pytorchs_own_grouping_gives(monkeypatch, masked: bool, past: int) -> None:
    """The form for devices whose kernels would repeat K and V."""
    module, x = MultiHeadAttention(48, 6, 2), torch.randn(2, 9, 48)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    found = []
    for grouped in (False, True):
        monkeypatch.setattr(_context, "_would_repeat", lambda *_, grouped=grouped: grouped)
        cache = DynamicCache()
        if past:
            module(x[:, :past], past_key_values=cache, attention_mask=mask[:, :past] if masked else None)
        found.append(module(x[:, past:], past_key_values=cache, attention_mask=mask if masked else None))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_len", "masked"), [(1, False), (1, True), (5, False), (5, True)])
@pytest.mark.parametrize("training", [False, True])
def test_no_key_or_value_is_repeated(dtype: torch.dtype, q_len: int, masked: bool, training: bool) -> None:
    heads, head_dim, past = 16, 32, 400
    module = MultiHeadAttention(64, heads, 2, head_dim, dtype=dtype).requires_grad_(training)
    cache = DynamicCache()
    with torch.no_grad():
        module(torch.randn(2, past, 64, dtype=dtype), past_key_values=cache)
    mask = torch.ones(2, past + q_len, dtype=torch.bool)
    mask[0, :3] = False
    with Made() as made:
        module(torch.randn(2, q_len, 64, dtype=dtype), past_key_values=cache, attention_mask=mask if masked else None)
    kv_elements = 2 * 2 * (past + q_len) * head_dim
    # The cache's own growth is two KV heads'; a copy for each of 16 query heads would be eight times that.
    assert kv_elements <= made.largest < 2 * kv_elements


def test_the_watcher_sees_a_repetition() -> None:
    key = torch.randn(2, 1, 400, 32)
    with Made() as made:
        key.repeat_interleave(16, 1)
    assert made.largest == 16 * key.numel()


def test_pytorchs_grouped_attention_on_the_cpu_allocates_no_copies() -> None:
    """A dispatch mode does not see inside a kernel; the allocator does."""
    query, key = torch.randn(1, 16, 4, 32), torch.randn(1, 1, 2000, 32)
    with (
        quiet_profiler(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run,
    ):
        torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    largest = max(event.cpu_memory_usage for event in run.events())
    assert 0 < largest < 4 * key.nbytes


def test_positions_in_16_bits_stay_exact() -> None:
    rotary = Rotary(8).to(torch.bfloat16)
    assert rotary.frequencies.dtype is torch.float32
    torch.testing.assert_close(rotary.frequencies, Rotary(8).frequencies, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_a_rotation_keeps_lengths_and_depends_on_distance_alone(layout: str) -> None:
    rotary = Rotary(8, layout=layout)
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotary(x, rotary.angles(torch.tensor([[position]]), torch.float64))

    torch.testing.assert_close(at(q, 0), q)
    torch.testing.assert_close(at(q, 7).norm(), q.norm())
    scores = [(at(q, 5 + shift) * at(k, 3 + shift)).sum() for shift in (0, 1, 90)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3))
    assert not torch.isclose((at(q, 5) * at(k, 3)).sum(), (at(q, 5) * at(k, 4)).sum())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((64, 8, 3), "num_key_value_heads: got 3"),
        ((64, 6, 6), "hidden_size: got 64"),
        ((24, 8, 8), "head_dim: got 3"),
        ((64, 8, 16), "num_key_value_heads: got 16"),
        ((64, 8, 0), "num_key_value_heads: got 0"),
        ((64.0, 8, 8), "hidden_size"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(args: tuple, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        MultiHeadAttention(*args)


def test_wrong_inputs_are_refused_and_leave_the_cache_alone() -> None:
    module, cache = MultiHeadAttention(16, 2, 1), DynamicCache()
    x = torch.randn(2, 3, 16)
    module(x, past_key_values=cache)
    wrong = [
        ({"hidden_states": x[..., :8]}, r"hidden_states: got 'shape \(2, 3, 8\)'"),
        ({"hidden_states": x[0]}, "hidden_states"),
        ({"hidden_states": x.double()}, "hidden_states: got 'torch.float64'"),
        ({"hidden_states": x[:, :0]}, "at least one token"),
        ({"attention_mask": torch.ones(2, 3, dtype=torch.bool)}, r"attention_mask: got 'shape \(2, 3\)'"),
        ({"attention_mask": torch.ones(2, 6)}, "attention_mask: got 'torch.float32'"),
        ({"past_key_values": [x]}, "past_key_values: got 'list'"),
        ({"layer_idx": -1}, "layer_idx: got -1"),
    ]
    for changes, why in wrong:
        with pytest.raises(ValueError, match=why):
            module(**({"hidden_states": x, "past_key_values": cache} | changes))
    assert cache.get_seq_length() == 3
    for refused in (torch.nn.Linear(3, 3), MultiHeadAttention(16, 2, 1)):
        with pytest.raises(ValueError, match="rotary_emb"):
            Rotary.from_transformers(refused)
    dynamic = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        MultiHeadAttention.from_llama(llama_layer()[0], dynamic)


def test_layers_of_other_attention_are_refused() -> None:
    layer, rotary = llama_layer()
    fields = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    fields |= {"vocab_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "pad_token_id": None}
    for config, why in (
        (Qwen3Config(**fields), "q_norm"),
        (MistralConfig(**fields, sliding_window=16), "sliding_window 16"),
        (Qwen2Config(**fields, layer_types=["sliding_attention"], use_sliding_window=True), "sliding"),
    ):
        refused = AutoModel.from_config(config).layers[0].self_attn
        with pytest.raises(ValueError, match=why):
            MultiHeadAttention.from_llama(refused, rotary)
    layer.scaling = 0.5
    with pytest.raises(ValueError, match="scaling 0.5"):
        MultiHeadAttention.from_llama(layer, rotary)
    layer.scaling, layer.k_proj = layer.head_dim**-0.5, torch.nn.Sequential(layer.k_proj)
    with pytest.raises(ValueError, match="not plain"):
        MultiHeadAttention.from_llama(layer, rotary)
