"""Exercise `attention_traffic`: bytes that attention moves with its matrix in memory, and tile by tile.

Dao et al. 2022, FlashAttention, section 3.2; blocks of queries outside, as FlashAttention-2 has them. Tested against
the count that the chapter's figures are drawn with.
"""

from labkit.attention.traffic import AttentionShape, flash_cost, standard_costs
from labkit.exercises._exercise import Answer, Exercise, as_number, expect, near, without_labkit

_SIGNATURE = "attention_traffic(q_len, kv_len, head_dim, block_q, bytes_per_element) -> (standard_bytes, flash_bytes)"
_OWN = ("attention/", "kernels/", "roofline", "step_costs", "sizing")
_DTYPES = {2: "float16", 4: "float32"}
Sizes = tuple[int, int, int, int, int]


def _pair(answer: Answer, sizes: Sizes) -> tuple[float, float]:
    value = without_labkit(lambda: answer(*sizes), _OWN)
    pair = isinstance(value, tuple | list) and len(value) == 2
    expect(pair, f"return two numbers, (standard_bytes, flash_bytes); got {type(value).__name__}")
    return as_number(value[0], "standard_bytes"), as_number(value[1], "flash_bytes")


def _targets(sizes: Sizes) -> tuple[int, int]:
    q_len, kv_len, head_dim, block_q, size = sizes
    shape, dtype = AttentionShape(1, 1, 1, q_len, kv_len, head_dim, False), _DTYPES[size]
    standard = sum(cost.bytes for cost in standard_costs(shape, dtype))
    return standard, flash_cost(shape, dtype, (block_q, kv_len)).bytes


def _why_standard(sizes: Sizes, found: float) -> str:
    q_len, kv_len, head_dim, _, size = sizes
    matrix, inputs = q_len * kv_len, 2 * (q_len + kv_len) * head_dim
    mistakes = {
        "count Q, K, V and the output as well": 4 * matrix * size,
        "the matrix crosses four times: scores out, scores in, weights out, weights in": (2 * matrix + inputs) * size,
        "the softmax reads what the first product wrote, and the second reads what it wrote: four crossings": (
            (3 * matrix + inputs) * size
        ),
        "the matrix never stays on the chip here": inputs * size,
        "these are elements: each takes bytes_per_element": 4 * matrix + inputs,
        "the output is written, too": (4 * matrix + inputs - q_len * head_dim) * size,
    }
    return next((f": {text}" for text, wrong in mistakes.items() if near(found, wrong)), "")


def _why_flash(sizes: Sizes, found: float) -> str:
    q_len, kv_len, head_dim, block_q, size = sizes
    queries, keys, statistics = 2 * q_len * head_dim, 2 * kv_len * head_dim, 4 * q_len
    blocks = -(-q_len // block_q)
    mistakes = {
        "K and V do not stay on the chip: each block of queries reads them again": (queries + keys) * size + statistics,
        "a ragged last block of queries reads K and V like any other": (
            (queries + q_len // block_q * keys) * size + statistics
        ),
        "a statistic of 4 bytes a row is written as well": (queries + blocks * keys) * size,
        "the statistic is float32, whatever the inputs are": (queries + blocks * keys + q_len) * size,
        "a block of queries reads K and V once, not each of its rows": (queries + q_len * keys) * size + statistics,
        "both K and V are read, and yours reads one of them": (queries + blocks * keys / 2) * size + statistics,
        "the queries are read once: it is K and V that come again": (queries * blocks + keys) * size + statistics,
        "these are elements: each takes bytes_per_element": queries + blocks * keys + statistics,
        "the matrix does not cross at all": (queries + blocks * keys + q_len * kv_len) * size + statistics,
    }
    return next((f": {text}" for text, wrong in mistakes.items() if near(found, wrong)), "")


def _test_shape(answer: Answer, sizes: Sizes) -> None:
    found, targets = _pair(answer, sizes), _targets(sizes)
    q_len, kv_len, head_dim, block_q, size = sizes
    where = f"{q_len} queries in blocks of {block_q}, {kv_len} keys, head_dim {head_dim}, {size} bytes a number"
    for name, value, target, why in zip(
        ("standard", "flash"), found, targets, (_why_standard, _why_flash), strict=True
    ):
        right = near(value, target)
        told = f"{where}: {name} attention moves {target:,} bytes; yours says {value:,.0f}"
        expect(right, told if right else told + why(sizes, value))


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    for sizes in (
        (1024, 1024, 64, 128, 2), (1024, 1024, 64, 128, 4), (300, 1000, 128, 128, 2), (1, 4096, 64, 64, 2),
        (257, 131, 80, 16, 4),
    ):  # fmt: skip
        _test_shape(answer, sizes)
    long = _pair(answer, (8192, 8192, 64, 128, 2))
    decode = _pair(answer, (1, 8192, 64, 128, 2))
    return f"{long[0] / long[1]:.1f} times fewer bytes at 8,192 tokens, and {decode[0] / decode[1]:.2f} for one query"


ATTENTION_TRAFFIC = Exercise(
    name="attention_traffic",
    chapter=4,
    task="The bytes that one head of attention moves: with the matrix of scores in memory, and block by block.",
    signature=_SIGNATURE,
    hints=(
        "Standard attention is three steps, and each reads its inputs and writes its output. How often does the matrix "
        "of q_len x kv_len numbers cross?",
        "Four times, beside Q, K, V and the output once each. Block by block it never does, but K and V cross once for "
        "every block of queries: how many blocks are there where block_q does not divide q_len?",
        "standard = (4 * q_len * kv_len + 2 * (q_len + kv_len) * head_dim) * bytes_per_element; flash = (2 * q_len + "
        "2 * kv_len * ceil(q_len / block_q)) * head_dim * bytes_per_element + 4 * q_len.",
    ),
    test=_test,
)
