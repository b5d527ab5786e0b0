"""A tiny model for the KV cache's lab, its bytes by hand, and a study of merged heads that nobody has to wait for."""

from labkit.attention import MergeStudy
from labkit.attention.recorded import MergeResult
from labkit.labs._kv_cache_compute import KVCacheCompute
from labkit.labs._kv_cache_result import KVCacheParams, KVCacheResult
from labkit.measure import Timing
from tests.labs.quantization_fixtures import loaded as quantization_loaded

LAYERS, HEADS, OWN, HEAD_DIM = 2, 4, 2, 32


def loaded():
    """Two layers, four query and two KV heads of 32, float32."""
    return quantization_loaded(head_dim=HEAD_DIM)


def params(seq_len: int = 256, num_key_value_heads: int = OWN, bits: int = 16, **others: object) -> KVCacheParams:
    return KVCacheParams(seq_len, num_key_value_heads, bits, **({"model": "tiny"} | others))


def run(compute: KVCacheCompute, *args: object, **others: object) -> list[KVCacheResult]:
    """Every result of one setting, in order."""
    return [s for s in compute(params(*args, **others), lambda: False) if isinstance(s, KVCacheResult)]


def by_hand(seq_len: int, heads: int, bits: int) -> int:
    """Bytes of a cache with groups of 32 and 32 recent tokens at least."""
    if bits == 16:
        return LAYERS * 2 * heads * HEAD_DIM * seq_len * 2
    old = (seq_len - 1 - 32) // 32 * 32
    # Each value has its share of a scale and a minimum of 16 bits; each layer counts its old tokens in an int32.
    return LAYERS * (2 * heads * HEAD_DIM * (old * (bits + 1) // 8 + 2 * (seq_len - old)) + 4)


class Spy:
    """Stands for `compare_ops`: calls each op `calls` times in turn, and gives it 3 s, in 16 bits 2 s."""

    def __init__(self, calls: int) -> None:
        self.calls, self.names = calls, []

    def __call__(self, ops, **_):
        self.names.append(list(ops))
        for _ in range(self.calls):
            for op in ops.values():
                op()
        return {name: Timing(2.0 if name == "full" else 3.0, 1.0, 4.0, 7) for name in ops}


def merged(method: str, perplexity: float, merge: str = "both") -> MergeResult:
    return MergeResult(method, merge, perplexity, 1.0, 1.0, 0.5, 1.0, 128, 2.0)


STUDY = MergeStudy(
    model="tiny",
    num_key_value_heads_before=OWN,
    num_key_value_heads=1,
    text="pydoc",
    other_text="other",
    seq_len=512,
    eval_windows=6,
    n_samples=8,
    fit_steps=1,
    baseline=10.0,
    bytes_per_token_before=1024,
    results=(merged("mean", 5000.0), merged("fitted", 40.0), merged("mean", 30.0, "keys")),
    healings=(),
    provenance={"machine": "a machine", "date": "2026-11-30", "commit": "abc"},
)
