"""A target that runs in milliseconds, a tokenizer that needs no file, and drafters that are right where a test says."""

import string

import plotly.graph_objects as go
import torch
from plotly.basedatatypes import BaseTraceType

from labkit.engine.decode import Decoder
from labkit.labs._speculative_compute import SpeculativeCompute
from labkit.labs._speculative_models import Targets
from labkit.labs._speculative_result import Round, SpeculativeParams, SpeculativeResult
from labkit.labs._speculative_tokens import tokens_of
from labkit.models import LoadedModel, tiny_model
from labkit.speculative.costs import SpeculationCosts
from labkit.speculative.interface import Proposal
from labkit.speculative.prompts import prompt_ids
from labkit.speculative.stats import Call, SpeculativeStats

CPU = torch.device("cpu")
PROMPTS = {"chat": "Why <b>?", "copy_heavy": "abc abc abc", "no_repeats": "xyz"}
# One from the prompt's pass, and a dozen.
NEW = 13


class Tokenizer:
    """One id a byte; ids past those of ASCII come as letters."""

    chat_template, eos_token_id = "yes", None

    def apply_chat_template(self, turns: list[dict[str, str]], **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(turns[0]["content"].encode())])}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(i) if i < 127 else f"<{i}>" for i in ids)


def loaded(name: str = "tiny", **overrides: object) -> LoadedModel:
    """Two layers of 64 hidden units."""
    return LoadedModel(tiny_model(**overrides), Tokenizer(), name)


def params(num_assistant_tokens: int = 3, **others: object) -> SpeculativeParams:
    fixed = {"temperature": 0.0, "proposer": "prompt lookup", "weights": "float32", "max_new_tokens": NEW}
    return SpeculativeParams(num_assistant_tokens, **(fixed | {"model": "tiny"} | others))


def continuation(model: LoadedModel, prompt: str = "chat", new: int = 40) -> tuple[list[int], list[int]]:
    """The prompt's tokens, and what the target says after them, greedily."""
    ids = prompt_ids(model.tokenizer, PROMPTS[prompt])
    whole = Decoder(model).generate(ids, max_new_tokens=new).sequences[0].tolist()
    return whole[: ids.shape[1]], whole[ids.shape[1] :]


class Scripted:
    """Drafts what the target will say, with another token in its place at draft `wrong_at`; counts what it is asked."""

    wants_hidden = False

    def __init__(self, truth: tuple[list[int], list[int]], wrong_at: int | None = None, vocab: int = 256) -> None:
        (prompt, self._said), self._wrong_at, self._vocab = truth, wrong_at, vocab
        self._prompt, self.asked, self.on_ask = len(prompt), 0, lambda: None

    def begin(self, *_: object) -> None:
        pass

    def propose(self, rows: list[list[int]], n: int) -> Proposal:
        self.asked += 1
        self.on_ask()
        at = len(rows[0]) - self._prompt
        draft = self._said[at : at + n]
        if self._wrong_at is not None and self._wrong_at < len(draft):
            draft[self._wrong_at] = (draft[self._wrong_at] + 1) % self._vocab
        return Proposal(torch.tensor([draft], dtype=torch.int64))

    def observe(self, *_: object) -> None:
        raise AssertionError("it wants no hidden states")


def computed(proposer: object, model: LoadedModel | None = None) -> SpeculativeCompute:
    """A compute whose proposer, whatever is asked for, is this one."""
    return SpeculativeCompute(Targets(model or loaded(), CPU), PROMPTS, make=lambda params: proposer)


def run(compute: SpeculativeCompute, *args: object, **others: object) -> list[SpeculativeResult]:
    """Every result of one setting, in order."""
    return [s for s in compute(params(*args, **others), lambda: False) if isinstance(s, SpeculativeResult)]


def costs(gamma: int, *, draft_cost: float = 0.1, verify_cost: float = 1.2, step_s: float = 0.01) -> SpeculationCosts:
    """Of a call, by hand."""
    return SpeculationCosts(gamma, step_s, step_s * verify_cost - 0.0002, step_s * draft_cost * gamma, 0.0002)


def call(drafted: str, n_accepted: int, emitted: str, kind: str) -> Call:
    """A call whose tokens are the letters of two words."""
    return Call(0, tuple(map(ord, drafted)), n_accepted, tuple(map(ord, emitted)), kind)


def stats(n_tested: int, n_matches: int, calls: int, emitted: int) -> SpeculativeStats:
    return SpeculativeStats(n_tested, n_tested, n_matches, calls, calls, emitted)


def by_hand(gamma: int, speedup: float, alpha: float = 0.8, **others: object) -> SpeculativeResult:
    """A result with this speed-up in each of its rounds, and costs for every length."""
    letters, kept = string.ascii_letters, min(2, max(0, gamma - 1))
    first, second = letters[:gamma], letters[gamma + 1 : 2 * gamma + 1]
    calls = (
        call("", 0, "P", "prompt"),
        call(first, kept, first[:kept] + letters[gamma], "residual" if gamma else "bonus"),
        call(second, gamma, second + letters[2 * gamma + 1], "bonus"),
    )
    tokens = tuple(token for index, one in enumerate(calls) for token in tokens_of(one, index, chr))
    counts = stats(10, round(10 * alpha), 4, 12) if gamma else stats(0, 0, 12, 12)
    found = {n: costs(n) for n in range(1, 9)} if gamma else {}
    rounds = (Round(0.01 * speedup, 0.01),) * 2
    known = {"calls": calls, "tokens": tokens, "stats": counts, "rounds": rounds, "costs": found}
    return SpeculativeResult(params(gamma, **others), "cpu", "bfloat16", "Why <b>?", 8, 2, **known)


def traces(figure: go.Figure) -> dict[str, BaseTraceType]:
    """By name."""
    return {trace.name: trace for trace in figure.data}


def points(trace: BaseTraceType) -> list[tuple]:
    """x and y of each."""
    return list(zip(trace.x or (), trace.y or (), strict=True))
