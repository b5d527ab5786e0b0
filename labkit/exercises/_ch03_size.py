"""Exercise `cache_size`: the bytes of a KV cache from its model's config, with what the groups of a quantized one add.

Tested on models whose bytes a token are known, and by how the bytes grow; labkit's own formula is not asked.
"""

from transformers import LlamaConfig, PretrainedConfig

from labkit.exercises._exercise import Answer, Exercise, Failed, as_number, expect, near, without_labkit
from labkit.models import model_config

_SIGNATURE = "cache_size(config, batch, seq_len, bits, group_size=None) -> bytes"
_OWN = ("sizing", "roofline", "step_costs", "kv_cache/", "kernels/types")
# Bytes a token at 16 bits, as the models' own papers and other engines give them.
_KNOWN = {"llama-3.1-8b": 131_072, "llama-2-7b": 524_288, "smollm2-135m": 23_040}
_PAIR_BITS = 32  # a scale and a minimum of 16 bits each


def _config(**changes: object) -> LlamaConfig:
    sizes = {"hidden_size": 512, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaConfig(**(sizes | {"head_dim": 64} | changes))


def _bytes(answer: Answer, config: PretrainedConfig, *arguments: int | None) -> float:
    value = without_labkit(lambda: answer(config, *arguments), _OWN)
    if arguments[2] < 8 and isinstance(value, int | float) and value == 0:
        raise Failed(f"{arguments[2]} bits a value came to 0 bytes: bits // 8 is 0; multiply first, and divide then")
    return as_number(value, "the bytes")


def _why(config: PretrainedConfig, found: float, target: float) -> str:
    """The usual mistake that explains a wrong factor, for 16 bits a value."""
    heads, kv_heads, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    inner = config.hidden_size / heads / config.head_dim
    factors = {
        0.5: "K and V are both kept: a factor of 2",
        8.0: "these are bits: 8 of them are a byte",
        1 / layers: "every layer keeps its own K and V: num_hidden_layers",
        heads / kv_heads: "K and V are kept for num_key_value_heads heads, not for num_attention_heads",
        inner: "head_dim is a field of its own, not hidden_size / num_attention_heads",
    }
    return next((f": {text}" for factor, text in factors.items() if factor != 1 and near(found / target, factor)), "")


def _test_known(answer: Answer) -> None:
    for name, target in _KNOWN.items():
        config = model_config(name)
        found = _bytes(answer, config, 1, 1, 16)
        told = f"{name} keeps {target:,} bytes a token at 16 bits; yours says {found:,.0f}"
        expect(near(found, target), told + _why(config, found, target))
    config, target = _config(head_dim=32), 2 * 5 * 4 * 32 * 2
    found = _bytes(answer, config, 1, 1, 16)
    told = f"5 layers of 4 KV heads, 32 wide, keep {target:,} bytes a token; yours says {found:,.0f}"
    expect(near(found, target), told + _why(config, found, target))


def _test_growth(answer: Answer) -> None:
    config = _config()
    one = _bytes(answer, config, 1, 64, 16)
    longer, more = _bytes(answer, config, 1, 192, 16), _bytes(answer, config, 3, 64, 16)
    expect(near(longer, 3 * one), "three times the tokens, three times the bytes: the cache grows with seq_len")
    expect(near(more, 3 * one), "three sequences, three times the bytes: each row of a batch has its own cache")
    for bits in (8, 4, 2):
        found = _bytes(answer, config, 1, 64, bits)
        told = f"without groups, {bits} bits a value take {bits}/16 of what 16 bits take"
        expect(near(found, one * bits / 16), f"{told}; yours takes {found / one:.3f}")


def _why_groups(added: float, values: int, pair: float) -> str:
    """What the bytes that a learner added for the groups look like; `pair` is what is right."""
    half = "half of it was added: a scale and a minimum, of 16 bits each, for the groups of K and for those of V"
    mistakes = {
        "nothing was added for the groups": 0.0,
        half: pair / 2,
        "twice that was added: a scale and a minimum take 16 bits each": pair * 2,
        "a scale and a minimum were added for every value: one pair serves a whole group": values * _PAIR_BITS / 8,
    }
    return next((f": {text}" for text, wrong in mistakes.items() if abs(added - wrong) < 1), "")


def _test_groups(answer: Answer) -> float:
    """Bits a value at 4 bits in groups of 32, as the learner's function has it."""
    config, batch, seq_len = _config(), 2, 128
    values = batch * seq_len * 2 * 5 * 4 * 64
    for bits, group_size in ((4, 32), (8, 64), (2, 16), (4, 128)):
        plain = values * bits / 8
        pair = values / group_size * _PAIR_BITS / 8
        found = _bytes(answer, config, batch, seq_len, bits, group_size)
        told = f"{bits} bits in groups of {group_size} are {8 * (plain + pair) / values:g} bits a value"
        why = _why_groups(found - plain, values, pair)
        expect(near(found, plain + pair), f"{told}; yours are {8 * found / values:.4g}{why}")
    return 8 * _bytes(answer, config, batch, seq_len, 4, 32) / values


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_known(answer)
    _test_growth(answer)
    real = _test_groups(answer)
    return f"131,072 bytes a token for Llama-3.1-8B; an INT4 cache in groups of 32 takes {real:g} bits a value, not 4"


CACHE_SIZE = Exercise(
    name="cache_size",
    chapter=3,
    task="The bytes of a KV cache from the model's config, with a scale and a minimum for each group if quantized.",
    signature=_SIGNATURE,
    hints=(
        "How many numbers does one token leave behind? Count K and V, the layers, the heads that have keys of their "
        "own, and the width of a head.",
        "values = 2 * num_hidden_layers * num_key_value_heads * head_dim * batch * seq_len; each takes bits / 8 bytes. "
        "Divide last: 4 // 8 is 0.",
        "There are values / group_size groups, in K and V together, and each adds a scale and a minimum of 2 bytes: "
        "values * bits / 8 + values / group_size * 4.",
    ),
    test=_test,
)
