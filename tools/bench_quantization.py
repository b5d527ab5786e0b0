"""The part of `make bench` on quantization: what each method keeps of the model, its time, and the decoding speed.

Perplexities are of the default model over the same six windows, which no calibration text shares a paragraph with.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from labkit.hardware import measure_ceilings, set_threads
from labkit.model_files.fetch import fetch_gguf
from labkit.models import DEFAULT_MODEL, list_models, load_model
from labkit.quantization import RTNConfig, quantize_, weight_bytes
from tools.bench_figure import Figure, take_turns
from tools.record_quantization import BUDGET, Recorder

_PROMPT_TOKENS, _NEW_TOKENS = 32, 48


@functools.cache
def _recorder() -> Recorder:
    recorder = Recorder()
    recorder.runs = []
    return recorder


@functools.cache
def _run(method: str, bits: int, plan: str = "", group_size: int = 64) -> dict[str, object]:
    """One setting, quantized and evaluated once, however many figures ask for it."""
    setting = {"method": method, "bits": bits, "group_size": group_size}
    return _recorder().run(setting | ({"plan": plan} if plan else {}))


def _base() -> float:
    return _recorder().baseline


def _closed(method: str, bits: int, target: float) -> Figure:
    """How much of what rounding to nearest loses, on the same grid, the method does not lose."""
    base, worst, found = _base(), _run("RTN", bits)["perplexity"], _run(method, bits)["perplexity"]
    note = f"perplexity {base:.2f} in float32, {worst:.2f} by rounding, {found:.2f} by {method}"
    params = {"bits": bits, "group_size": 64, "baseline": base, "rtn": worst, "perplexity": found}
    name = f"{method}, {bits} bits: loss of rounding closed"
    return Figure(name, ((worst - found) / (worst - base),), "fraction", target, True, note, params)


def quality() -> Iterator[Figure]:
    """Perplexity by method and bits, and the time that GPTQ takes."""
    yield _closed("GPTQ", 4, 0.55)
    yield _closed("AWQ", 4, 0.35)
    yield _closed("GPTQ", 3, 0.70)
    eight = _run("RTN", 8)
    note = f"perplexity {_base():.2f} and {eight['perplexity']:.2f}"
    yield Figure("8 bits: perplexity lost", (eight["perplexity"] / _base() - 1,), "fraction", 0.005, False, note)
    best = _run("AWQ", 4, f"{BUDGET} of 16 bits")
    note = f"perplexity {best['perplexity']:.2f}, {best['bits_per_weight']:.2f} bits a weight"
    yield Figure("best setting: perplexity lost", (best["perplexity"] / _base() - 1,), "fraction", 0.08, False, note)
    yield Figure(
        "best setting: bytes over bf16", (best["bits_per_weight"] / 16,), "ratio", BUDGET, False, "layers only"
    )
    seconds = _run("GPTQ", 4)["seconds"]
    yield Figure("GPTQ, 32 x 512 tokens, whole model", (seconds,), "s", 240.0, False, f"{_recorder().threads} threads")


def speed() -> Iterator[Figure]:
    """Decoding with 4-bit weights against float32, in turns, and against the bandwidth that there is."""
    from labkit.engine import Decoder

    threads = set_threads()
    dense = load_model(device="cpu", dtype=torch.float32)
    packed = load_model(device="cpu", dtype=torch.bfloat16)
    quantize_(packed, RTNConfig(bits=4, group_size=64), progress=False)
    prompt = torch.randint(1000, (1, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    decoders = {"float32": Decoder(dense), "int4": Decoder(packed)}

    def rate(name: str) -> float:
        return 1 / decoders[name].generate(prompt, max_new_tokens=_NEW_TOKENS).tpot_s

    turns = take_turns({name: functools.partial(rate, name) for name in decoders} | {"roof": _bandwidth}, 5)
    ratios = [a / b for a, b in zip(turns["int4"], turns["float32"], strict=True)]
    rates = {name: statistics.median(values) for name, values in turns.items()}
    reached = weight_bytes(packed) * rates["int4"] / rates["roof"]
    note = f"{rates['int4']:.1f} and {rates['float32']:.1f} tokens/s; {reached:.0%} of the read bandwidth"
    params = {"threads": threads, "share_of_bandwidth": reached}
    yield Figure("int4 decoding over float32", tuple(ratios), "ratio", 2.0, True, note, params)
    yield from _llama_cpp(rates["int4"], threads)


def _bandwidth() -> float:
    return measure_ceilings("cpu", refresh=True).read_bandwidth


def _llama_cpp(ours: float, threads: int) -> Iterator[Figure]:
    """Beside llama.cpp on the file that the default model's weights come from, where its Python package is."""
    try:
        from llama_cpp import Llama
    except ImportError:
        print("llama.cpp: not installed (pip install llama-cpp-python compiles it, for some twenty minutes)")
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch_gguf(list_models()[DEFAULT_MODEL], Path(folder))
        llama = Llama(str(gguf), n_ctx=256, n_threads=threads, verbose=False)
        theirs = statistics.median([_llama_rate(llama) for _ in range(4)][1:])
    note = f"{ours:.1f} and {theirs:.1f} tokens/s"
    yield Figure("int4 decoding over llama.cpp Q4_1", (ours / theirs,), "ratio", 0.5, True, note)


def _llama_rate(llama: object) -> float:
    llama.reset()
    llama.eval(list(range(1, 1 + _PROMPT_TOKENS)))
    begin = time.perf_counter()
    for _ in range(_NEW_TOKENS):
        llama.eval([llama.sample(temp=0.0)])
    return _NEW_TOKENS / (time.perf_counter() - begin)


def training() -> Iterator[Figure]:
    """What a short quantization-aware training wins back of GPTQ's 3-bit loss, and how long it took."""
    from labkit.quantization.qat_study import qat_study

    study = qat_study()
    note = f"perplexity {study.points[0].perplexity:.2f} to {study.perplexity:.2f}, float {study.baseline:.2f}"
    yield Figure("QAT: 3-bit loss of GPTQ won back", (study.recovered,), "fraction", 1 / 3, True, note)
    yield Figure("QAT: time", (study.seconds,), "s", 600.0, False, "")
