"""The part of `make bench` on speculative decoding: tokens a call, speed over plain decoding, and over `transformers`.

Greedy, on the held-out prompts of `data/prompts.yaml`. Every output is compared with plain decoding, token by token;
one that parts where rounding alone can have chosen is counted and said, one that parts elsewhere is an error.
"""

import functools
from collections.abc import Iterator

import torch

from labkit.engine import Decoder
from labkit.hardware import set_threads
from labkit.models import LoadedModel, load_model
from labkit.quantization import RTNConfig, quantize_
from labkit.speculative import DraftTree, EagleHead, PromptLookup
from labkit.speculative.compare import Comparison, MethodResult, compare_methods
from labkit.speculative.costs import measure_costs
from labkit.speculative.interface import Proposer
from labkit.speculative.peers import peer_methods
from labkit.speculative.prompts import load_prompts, prompt_ids
from tools.bench_figure import Figure

_NEW_TOKENS = 128
# A pass of four tokens is the last before the packed 4-bit product on a CPU steps up; the head's drafts cost something,
# so that two pay best.
_GAMMA, _HEAD_GAMMA = 3, 2
# Wide at the first place, where a refusal costs most: chosen by acceptance at each rank. For weights whose pass over 33
# tokens costs little more than over one, such as bfloat16 here.
_TREE = DraftTree.of_ranks(
    [(rank,) for rank in range(8)]
    + [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0), (4, 0)]
    + [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 0, 0), (1, 0, 1), (2, 0, 0)]
    + [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 0, 0, 0)]
)


@functools.cache
def _target(weights: str) -> LoadedModel:
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    loaded = load_model(device="cpu", dtype=dtype)
    if weights == "int4":
        quantize_(loaded, RTNConfig(bits=4, group_size=64), progress=False)
    return loaded


def _prompts(kind: str, weights: str, most: int | None = None) -> list[torch.Tensor]:
    tokenizer = _target(weights).tokenizer
    return [prompt_ids(tokenizer, prompt) for prompt in load_prompts(kind)[:most]]


def _compared(
    weights: str, kind: str, proposers: dict[str, Proposer], gamma: int, *, most: int | None = None, theirs: str = ""
) -> Comparison:
    """Plain decoding, each proposer and, on demand, a method of `transformers`, in turns over the prompts of a kind."""
    loaded = _target(weights)
    methods = peer_methods(
        loaded,
        proposers,
        max_new_tokens=_NEW_TOKENS,
        num_assistant_tokens=gamma,
        eos_token_id=loaded.tokenizer.eos_token_id,
    )
    kept = {name: way for name, way in methods.items() if name.startswith("labkit") or name == theirs}
    compared = compare_methods(kept, _prompts(kind, weights, most), 1, target=loaded)
    for method in compared.methods:
        # transformers rounds its own way; what it says is its own affair.
        if method.name.startswith("labkit") and method.unequal:
            raise AssertionError(f"{method.name}: {method.unequal} outputs differ by more than rounding")
    return compared


def _note(method: MethodResult) -> str:
    stats, prompts = method.stats, len(method.new_tokens)
    same = f"{prompts - method.rounded} of {prompts} outputs the same, {method.rounded} part within rounding"
    return f"acceptance {stats.acceptance_rate:.2f}, {stats.tokens_per_target_call:.2f} tokens a call; {same}"


def _speed(
    compared: Comparison, name: str, title: str, target: float, over: str | None = None, gamma: int = _GAMMA
) -> Figure:
    found = compared.of(name)
    params = {"num_assistant_tokens": gamma, "new_tokens": _NEW_TOKENS, "threads": torch.get_num_threads()}
    return Figure(title, (compared.ratio(name, over),), "ratio", target, True, _note(found), params)


def eagle() -> Iterator[Figure]:
    """The head that ships with the course, on the 50 chat prompts."""
    set_threads()
    head, small = EagleHead.load(), DraftTree.of_ranks([(0,), (1,), (0, 0)])
    large = EagleHead(head.model, _TREE)
    tree = _compared("bfloat16", "chat", {"tree": large}, 5).of("labkit, tree")
    calls = (tree.stats.tokens_per_target_call,)
    title = f"EagleHead, a tree of {len(_TREE)}, bfloat16: tokens a target call"
    yield Figure(title, calls, "tokens", 2.2, True, _note(tree))
    proposers = {"chain": head, "small tree": EagleHead(head.model, small)}
    four = _compared("int4", "chat", proposers, _HEAD_GAMMA)
    for name in proposers:
        title = f"EagleHead, {name}, int4: speed over plain decoding"
        yield _speed(four, f"labkit, {name}", title, 1.2, gamma=_HEAD_GAMMA)
    yield from _against_the_model("int4", "chain", head, four, gamma=_HEAD_GAMMA)


def lookup() -> Iterator[Figure]:
    """Prompt lookup where answers copy and where they repeat nothing, and beside the one of `transformers`."""
    set_threads()
    theirs = "transformers, prompt lookup"
    copying = _compared("int4", "copy_heavy", {"lookup": PromptLookup()}, _GAMMA, theirs=theirs)
    yield _speed(copying, "labkit, lookup", "PromptLookup, int4, copying: speed over plain decoding", 1.5)
    title = "PromptLookup, int4, copying: speed over transformers' prompt lookup"
    yield _speed(copying, "labkit, lookup", title, 1.0, theirs)
    yield from _against_the_model("int4", "lookup", PromptLookup(), copying, "copy_heavy")
    new = _compared("int4", "no_repeats", {"lookup": PromptLookup()}, _GAMMA)
    worst = min(new.ratios("labkit, lookup"))
    title = "PromptLookup, int4, without repeats: speed over plain decoding, worst prompt"
    yield Figure(title, (worst,), "ratio", 0.9, True, _note(new.of("labkit, lookup")))


def _against_the_model(
    weights: str, name: str, proposer: Proposer, compared: Comparison, kind: str = "chat", gamma: int = _GAMMA
) -> Iterator[Figure]:
    """How far the measured speed-up is from the time model, whose α, c and v were measured."""
    prompt = _prompts(kind, weights, 1)[0]
    costs = measure_costs(Decoder(_target(weights)), proposer, prompt, gamma, min_run_s=1.0)
    found, measured = compared.of(f"labkit, {name}"), compared.ratio(f"labkit, {name}")
    alpha = found.stats.acceptance_rate
    modelled = costs.speedup_at(found.stats.tokens_per_target_call)
    note = f"measured {measured:.2f}, modelled {modelled:.2f} (by the formula's E {costs.speedup(alpha):.2f}); "
    note += f"α {alpha:.2f}, c {costs.draft_cost:.3f}, v {costs.verify_cost:.2f}"
    yield Figure(
        f"{name}, {weights}: measured off the time model", (abs(measured / modelled - 1),), "fraction", 0.15, note=note
    )


def speculation() -> Iterator[Figure]:
    """All of it."""
    yield from eagle()
    yield from lookup()
