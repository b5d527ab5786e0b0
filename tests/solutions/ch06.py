"""Chapter 06's solutions, and wrong answers that learners give, as the text of the cells tagged `exercise:<name>`.

SOLUTIONS[name] replaces the tagged cell when the chapter is run with its solutions; STUBS[name] is an untouched one.
WRONG[name] holds pairs: a cell's text, and a phrase that the check's message must contain, naming what failed.
ALSO_RIGHT[name] holds cells that are right in another way, and must pass.
ANSWERS[name] is what is passed to `check`, as in the notebook's next cell.
"""

ANSWERS: dict[str, str] = {
    "predict_rung": "predict_rung",
    "goes_together": "goes_together",
    "choose_stack": "choose_stack",
    "top_p_filter": "top_p_filter",
    "read_load": "read_load",
    "fixed_ladder": "fixed_ladder",
}

STUBS: dict[str, str] = {
    "predict_rung": """
def predict_rung(before, after, fixed_s, bandwidth): ...  # return the speed-up
""",
    "goes_together": """
def goes_together(rungs, on_gpu, bits, has_draft): ...  # return a list of the rungs that go on
""",
    "choose_stack": """
def choose_stack(steps, memory_limit, max_loss): ...  # return a step's name, or "" if none will do
""",
    "top_p_filter": """
def top_p_filter(probs, top_p): ...  # return probabilities in the shape of probs
""",
    "read_load": """
def read_load(levels): ...  # return ({concurrency: (ttft, tpot, requests_per_s, tokens_per_s)}, knee)
""",
    "fixed_ladder": """
fixed_ladder = None  # your function, with the same argument
""",
}

SOLUTIONS: dict[str, str] = {
    "predict_rung": """
def predict_rung(before, after, fixed_s, bandwidth):
    def seconds(parts):
        return fixed_s + sum(parts.values()) / bandwidth

    return seconds(before) / seconds(after)
""",
    "goes_together": """
def goes_together(rungs, on_gpu, bits, has_draft):
    on = []
    for rung in rungs:
        refused = (
            (rung == "bfloat16" and bits <= 16)
            or (rung == "int8" and "int4" in on)
            or (rung == "step" and on_gpu and "quantized_kv" in on)
            or (rung == "quantized_kv" and on_gpu and "step" in on)
            or (rung == "speculation" and ("step" not in on or not has_draft))
        )
        if not refused:
            on.append(rung)
    return on
""",
    "choose_stack": """
def choose_stack(steps, memory_limit, max_loss):
    fits = [s for s in steps if s.peak_bytes <= memory_limit and s.loss <= max_loss]
    if not fits:
        return ""
    return min(fits, key=lambda s: (-s.tokens_per_second, s.loss, s.peak_bytes)).name
""",
    "top_p_filter": """
import torch

def top_p_filter(probs, top_p):
    ordered, order = probs.sort(-1, descending=True)
    gone = ordered.cumsum(-1) - ordered >= top_p
    kept = probs.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), 0.0)
    return kept / kept.sum(-1, keepdim=True)
""",
    "read_load": """
def read_load(levels):
    rows = {}
    for n, requests in levels.items():
        done = [r for r in requests if r.times]
        seconds = max(r.times[-1] for r in done) - min(r.sent for r in done)
        ttft = [r.times[0] - r.sent for r in done]
        tpot = [(r.times[-1] - r.times[0]) / (len(r.times) - 1) for r in done if len(r.times) > 1]
        tokens = sum(len(r.times) for r in done)
        rows[n] = sum(ttft) / len(ttft), sum(tpot) / len(tpot), len(done) / seconds, tokens / seconds
    order = sorted(levels)
    for n, more in zip(order, order[1:]):
        if rows[more][3] < 1.1 * rows[n][3]:
            return rows, n
    return rows, order[-1]
""",
    "fixed_ladder": """
def fixed_ladder(runs):
    def rate(run):
        return sum(run.tokens) / sum(run.seconds)

    rows, first = [], runs[0]
    for run in runs:
        memory = max(run.peak_bytes) / max(first.peak_bytes)
        rows.append((run.name, rate(run) / rate(first), memory))
    return rows
""",
}


def _changed(name: str, *changes: tuple[str, str]) -> str:
    """The solution with its right lines made wrong."""
    text = SOLUTIONS[name]
    for right, wrong in changes:
        assert right in text, right
        text = text.replace(right, wrong)
    return text


def _predict(*changes: tuple[str, str]) -> str:
    return _changed("predict_rung", *changes)


def _together(*changes: tuple[str, str]) -> str:
    return _changed("goes_together", *changes)


def _choose(*changes: tuple[str, str]) -> str:
    return _changed("choose_stack", *changes)


def _top_p(*changes: tuple[str, str]) -> str:
    return _changed("top_p_filter", *changes)


def _load(*changes: tuple[str, str]) -> str:
    return _changed("read_load", *changes)


def _fixed(*changes: tuple[str, str]) -> str:
    return _changed("fixed_ladder", *changes)


_SECONDS = "seconds(before) / seconds(after)"
_CHANGED_PARTS = """
def predict_rung(before, after, fixed_s, bandwidth):
    parts = [p for p in before if p in after and before[p] != after[p]]
    seconds = lambda step: fixed_s + sum(step[p] for p in parts) / bandwidth
    return seconds(before) / seconds(after) if parts else 1.0
"""
_BODY_ALONE = """
def predict_rung(before, after, fixed_s, bandwidth):
    return (fixed_s + before["body"] / bandwidth) / (fixed_s + after["body"] / bandwidth)
"""
_PRODUCT_OF_PARTS = """
from math import prod

def predict_rung(before, after, fixed_s, bandwidth):
    return prod(before[p] / after[p] for p in before if p in after)
"""
_MEAN_OF_PARTS = """
def predict_rung(before, after, fixed_s, bandwidth):
    gains = [before[p] / after[p] for p in before if p in after]
    return sum(gains) / len(gains)
"""
_LABKIT_REFUSALS = """
import torch
from labkit.engine.ladder import refusals

def goes_together(rungs, on_gpu, bits, has_draft):
    dtype = {32: torch.float32, 16: torch.bfloat16, 8: torch.bfloat16}[bits]
    refused = refusals(rungs, device="cpu", dtype=dtype, has_proposer=has_draft)
    return [rung for rung in rungs if rung not in refused]
"""
_KV = '(rung == "quantized_kv" and on_gpu and "step" in on)'
_STEP = '(rung == "step" and on_gpu and "quantized_kv" in on)'
_BF16 = '(rung == "bfloat16" and bits <= 16)'
_INT8 = '(rung == "int8" and "int4" in on)'
_DRAFT = '("step" not in on or not has_draft)'
_FITS = "s.peak_bytes <= memory_limit and s.loss <= max_loss"
_KEY = "(-s.tokens_per_second, s.loss, s.peak_bytes)"
_FASTEST_OR_NOTHING = """
def choose_stack(steps, memory_limit, max_loss):
    if not steps:
        return ""
    best = min(steps, key=lambda s: (-s.tokens_per_second, s.loss, s.peak_bytes))
    return best.name if best.peak_bytes <= memory_limit and best.loss <= max_loss else ""
"""
_RUNG_BY_RUNG = """
def choose_stack(steps, memory_limit, max_loss):
    for s in steps:
        if s.peak_bytes <= memory_limit and s.loss <= max_loss:
            return s.name
    return ""
"""
_LAST_THAT_FITS = _RUNG_BY_RUNG.replace("in steps:", "in reversed(steps):")
_LABKIT_TOP_P = """
import torch
from labkit.engine.sampling import probabilities

def top_p_filter(probs, top_p):
    return probabilities(probs.log(), 1.0, 0, top_p)
"""
_TRANSFORMERS_TOP_P = """
import torch
from transformers import TopPLogitsWarper

def top_p_filter(probs, top_p):
    rows = probs.log().reshape(-1, probs.shape[-1])
    return TopPLogitsWarper(top_p)(None, rows).softmax(-1).reshape(probs.shape)
"""
_SCATTER = "torch.zeros_like(gone).scatter(-1, order, gone)"
_LEVEL_AFTER = ("return rows, n\n", "return rows, more\n")
_REPORT = """
def fixed_ladder(runs):
    rows, first = [], runs[0]
    for run in runs:
        memory = sum(run.peak_bytes) / sum(first.peak_bytes)
        rows.append((run.name, 1 / memory, memory))
    return rows
"""
_MEAN_OF_RATES = (
    "sum(run.tokens) / sum(run.seconds)",
    "sum(n / s for n, s in zip(run.tokens, run.seconds)) / len(run.tokens)",
)
_PREVIOUS = ("        rows.append", "        rows.append"), ("memory))\n", "memory))\n        first = run\n")
_PEAKS = "max(run.peak_bytes) / max(first.peak_bytes)"
_RATES = "rate(run) / rate(first)"

WRONG: dict[str, list[tuple[str, str]]] = {
    "predict_rung": [
        (_predict(("return fixed_s + sum", "return sum")), "a step also takes fixed_s, in seconds"),
        (_predict((_SECONDS, "(seconds(before) - fixed_s) / seconds(after)")), "fixed_s is in the step before"),
        (_predict((_SECONDS, "seconds(before) / (seconds(after) - fixed_s)")), "it is in the step after it, too"),
        (_predict((_SECONDS, "seconds(after) / seconds(before)")), "a speed-up is before over after"),
        (_predict((" / bandwidth", "")), "takes fixed_s, in seconds, before and after"),
        (_predict(("parts.values()", "(parts[p] for p in before if p in after)")), "a part may be there before"),
        (_predict(("parts.values()", "(parts[p] for p in before)")), "your function raised KeyError"),
        (_CHANGED_PARTS, "what the rung leaves as it was is read as well"),
        (_BODY_ALONE, "yours says"),
        (_PRODUCT_OF_PARTS, "the parts' speed-ups do not multiply"),
        (_MEAN_OF_PARTS, "as much weight as a large one"),
        (_predict((_SECONDS, "seconds(before) - seconds(after)")), "should be a positive"),
        (_predict((_SECONDS, "seconds(before) / seconds(after) - 1")), "should be a positive"),
        (_predict(("    return seconds(b", "    before.pop('kv')\n    return seconds(b")), "should stay as it is"),
        (_predict((_SECONDS, "'fast'")), "should be a number"),
    ],
    "goes_together": [
        (_together(("return on\n", "return [rung for rung in rungs if rung not in on]\n")), "that do not go on"),
        (_together(("if not refused:", "if refused:")), "go on; yours says"),
        (
            _together(
                ("return on\n", "return sorted(on, key=ALL.index)\n"),
                (
                    "    on = []\n",
                    "    ALL = ['step', 'bfloat16', 'int8', 'int4', 'int8_head', 'attention', "
                    "'quantized_kv', 'speculation']\n    on = []\n",
                ),
            ),
            "keep the order",
        ),
        (
            _together(("            on.append(rung)", "            on.append(rung)\n        else:\n            break")),
            "the next ones are still tried",
        ),
        (_together((" in on", " in rungs")), "not on what comes after it"),
        (_together((" in on", " in rungs[: rungs.index(rung)]")), "a rung that was refused is not on"),
        (_together((_BF16, "False")), "weights of 16 bits cannot go to 16 bits again"),
        (_together(("bits <= 16", "bits == 16")), "weights of 8 bits have no more than 16"),
        (_together((_INT8, "False")), "INT8 does not go on INT4"),
        (_together((_INT8, _INT8 + ' or (rung == "int4" and "int8" in on)')), "takes its place"),
        (_together(("on_gpu and ", "")), "on a GPU alone"),
        (_together((_KV, "False")), "the quantized cache does not go on the step"),
        (_together((_STEP, "False")), "the step does not go on the quantized cache either"),
        (_together((_KV, '(rung == "quantized_kv" and on_gpu)')), "without it a quantized cache goes on"),
        (_together((_KV, _KV + ' or (rung == "quantized_kv" and bits == 8)')), "go on; yours says"),
        (_together((_DRAFT, "not has_draft")), "speculation needs the own step"),
        (_together((_DRAFT, '"step" not in on')), "speculation needs something that drafts"),
        (_together(("not has_draft", "has_draft")), "go on; yours says"),
        (_together(("return on\n", "return set(on)\n")), "return a list of rungs; got set"),
        (_together(("return on\n", "return on or None\n")), "returned nothing for some arguments"),
        (_together(("    on = []", "    rungs.sort()\n    on = []")), "should stay as it is"),
        (_together(("    return on", "    return rungs")), "go on; yours says"),
        (_LABKIT_REFUSALS, "write it yourself: your function called labkit's own refusals"),
    ],
    "choose_stack": [
        (_choose((_FITS, "s.loss <= max_loss")), "looks at the quality alone"),
        (_choose((_FITS, "s.peak_bytes <= memory_limit")), "looks at the memory alone"),
        (_FASTEST_OR_NOTHING, "the fastest of all may not fit where a slower one does"),
        (_choose((_FITS, "s.peak_bytes < memory_limit and s.loss < max_loss")), "at the limit fits"),
        (_choose((_FITS, "s.peak_bytes <= memory_limit and s.loss < max_loss")), "it is; yours says"),
        (_choose(("s.loss <= max_loss", "abs(s.loss) <= max_loss")), "a model may have got better"),
        (_RUNG_BY_RUNG, "the first that fits"),
        (_LAST_THAT_FITS, "the last rung is not always the fastest"),
        (_choose((_KEY, "s.peak_bytes")), "the smallest that fits; asked is the fastest"),
        (_choose((_KEY, "s.loss")), "the one with the least loss; asked is the fastest"),
        (_choose((_KEY, "-s.tokens_per_second")), "of equally fast ones take the one with the least loss"),
        (_choose((_KEY, "(-s.tokens_per_second, s.peak_bytes, s.loss)")), "the loss decides before the memory"),
        (_choose((_KEY, "(-s.tokens_per_second, s.loss)")), "with the same loss take the smallest"),
        (_choose(("-s.tokens", "s.tokens")), "the fastest, not the slowest"),
        (_choose(('return ""', "return None")), "returned nothing for some arguments"),
        (_choose(('    if not fits:\n        return ""\n', "")), "your function raised ValueError"),
        (_choose((").name", ")")), "return a name, step.name"),
        (_choose(("    fits", "    steps.sort(key=lambda s: s.name)\n    fits")), "should stay as it is"),
        (_choose((" and s.loss", " or s.loss")), "it is; yours says"),
    ],
    "top_p_filter": [
        (_top_p(("kept / kept.sum(-1, keepdim=True)", "kept")), "what is kept should sum to 1 again"),
        (_top_p(("ordered.cumsum(-1) - ordered >= top_p", "ordered.cumsum(-1) > top_p")), "should be finite"),
        (
            _top_p(
                ("ordered.cumsum(-1) - ordered >= top_p", "ordered.cumsum(-1) > top_p"),
                ("/ kept.sum(-1, keepdim=True)", "/ kept.sum(-1, keepdim=True).clamp(min=1e-9)"),
            ),
            "the token with which the sum reaches top_p is kept, too",
        ),
        (
            _top_p(("ordered.cumsum(-1) - ordered >= top_p", "ordered.cumsum(-1) - ordered > top_p")),
            "a sum that is exactly top_p has reached it",
        ),
        (
            _top_p(("    kept =", "    gone = torch.nn.functional.pad(gone[..., :-1], (1, 0))\n    kept =")),
            "this keeps one more",
        ),
        (_top_p((f"probs.masked_fill({_SCATTER}", "ordered.masked_fill(gone")), "come back in sorted order"),
        (_top_p((_SCATTER, "gone")), "are kept; yours keeps"),
        (_top_p((_SCATTER, "(probs < 1 - top_p) & (probs < probs.amax(-1, keepdim=True))")), "asked is the sum"),
        (_top_p((_SCATTER, "probs < top_p * probs.amax(-1, keepdim=True)")), "another filter, min-p"),
        (
            _top_p(("kept / kept.sum(-1, keepdim=True)", "kept.masked_fill(kept == 0, -torch.inf).softmax(-1)")),
            "without a softmax",
        ),
        (_top_p((", descending=True", "")), "sort them descending"),
        (_top_p(("return kept / kept.sum(-1, keepdim=True)", "return probs")), "leaves everything as it was"),
        (_top_p(("kept.sum(-1, keepdim=True)", "kept.sum()")), "are kept; yours keeps"),
        (
            _top_p(("    kept =", "    gone = gone.reshape(-1, gone.shape[-1])[0].expand_as(gone)\n    kept =")),
            "each row has its own sum",
        ),
        (_top_p(("0.0)", "1e-6)")), "are kept; yours keeps"),
        (_top_p(("0.0)", "1e-12)")), "are kept; yours keeps"),
        (_top_p(("probs.masked_fill", "probs.masked_fill_")), "changed it in place"),
        (_top_p((">= top_p", ">= 0.9")), "are kept; yours keeps"),
        (
            _top_p((_SCATTER, "probs < ordered.masked_fill(gone, 2.0).amin(-1, keepdim=True)")),
            "8 equal probabilities at top_p 0.5: 4 of them are enough; yours keeps 8",
        ),
        (_top_p(("return kept", "return (kept"), ("keepdim=True)\n", "keepdim=True))[..., :-1]\n")), "have the shape"),
        (_top_p(("return kept / kept.sum(-1, keepdim=True)", "return kept.tolist()")), "should be a torch tensor"),
        (_LABKIT_TOP_P, "write it yourself: your function called labkit's own probabilities"),
        (_TRANSFORMERS_TOP_P, "write it yourself: your function called transformers'"),
    ],
    "read_load": [
        (_load(("r.times[0] - r.sent", "r.times[0] - requests[0].sent")), "each request waits from its own sending"),
        (_load(("r.times[0] - r.sent", "r.times[-1] - r.sent")), "this is the whole answer's time"),
        (
            _load(
                ("(r.times[-1] - r.times[0]) / (len(r.times) - 1)", "(r.times[-1] - r.sent) / len(r.times)"),
                (" if len(r.times) > 1]", "]"),
            ),
            "the wait for the first token is TTFT",
        ),
        (_load(("(r.times[-1] - r.times[0])", "(r.times[-1] - r.sent)")), "begins at the first token"),
        (_load(("/ (len(r.times) - 1)", "/ len(r.times)")), "n - 1 gaps"),
        (
            _load(("(len(r.times) - 1) for r in done if len(r.times) > 1", "max(1, len(r.times) - 1) for r in done")),
            "has no TPOT, not one of 0",
        ),
        (_load((" if len(r.times) > 1]", "]")), "your function raised ZeroDivisionError"),
        (
            _load(("sum(tpot) / len(tpot)", "sum(r.times[-1] - r.times[0] for r in done) / (tokens - len(done))")),
            "here a long answer counts for more",
        ),
        (_load(("done = [r for r in requests if r.times]", "done = requests")), "your function raised IndexError"),
        (_load(("len(done) / seconds", "len(requests) / seconds")), "a request that failed counts nowhere"),
        (
            _load(
                (
                    "max(r.times[-1] for r in done) - min(r.sent for r in done)",
                    "sum(r.times[-1] - r.sent for r in done)",
                )
            ),
            "run beside each other: not the sum of their times",
        ),
        (_load(("min(r.sent for", "min(r.times[0] for")), "begins when the first request is sent"),
        (_load(("tokens / seconds", "(tokens - len(done)) / seconds")), "the first tokens are output, too"),
        (
            _load(("tokens / seconds", "sum(len(r.times) / (r.times[-1] - r.sent) for r in done) / len(done)")),
            "the speed that one of them sees",
        ),
        (
            _load(("tokens / seconds", "tokens / sum(r.times[-1] - r.sent for r in done)")),
            "tokens/s is",
        ),
        (_load(("max(r.times[-1] for r in done)", "done[-1].times[-1]")), "requests/s is"),
        (_load(_LEVEL_AFTER), "not the one after it"),
        (_load(("sorted(levels)", "list(levels)")), "the levels come in any order"),
        (
            _load(
                (
                    "    for n, more in zip(order, order[1:]):\n        if rows[more][3] < 1.1 * rows[n][3]:\n"
                    "            return rows, n\n    return rows, order[-1]",
                    "    return rows, max(rows, key=lambda n: rows[n][3])",
                )
            ),
            "the level with the highest throughput",
        ),
        (_load(("< 1.1 * rows", "< rows")), "less than 10% more ends it"),
        (_load(("return rows, order[-1]", "return rows, 0")), "the knee should be one of"),
        (_load(("return rows, n\n", "return rows\n")), "return two things"),
        (_load(("return rows, n\n", "return {n: rows[n]}, n\n")), "a row for each of"),
        (_load(("rows[n] = sum(ttft) / len(ttft), ", "rows[n] = ")), "should be 4 numbers; got 3"),
        (_load(("    order", "    levels.clear()\n    order"), ("sorted(levels)", "sorted(rows)")), "stay as it is"),
        (_load(("(r.times[-1] - r.times[0])", "1000 * (r.times[-1] - r.times[0])")), "TPOT is"),
    ],
    "fixed_ladder": [
        (_REPORT, "this is a ratio of memory, and no speed"),
        (_fixed((_RATES, "1 / memory")), "this is a ratio of peaks, and no speed"),
        (
            _REPORT.replace(
                "1 / memory", "sum(run.tokens) / sum(run.seconds) * sum(first.seconds) / sum(first.tokens)"
            ),
            "the largest of the prompts' peaks must fit",
        ),
        (_fixed((_RATES, "sum(first.seconds) / sum(run.seconds)")), "makes fewer tokens, and is not faster"),
        (_fixed(_MEAN_OF_RATES), "not the mean of the prompts' rates"),
        (_fixed(*_PREVIOUS), "the baseline is the first run, not the one before"),
        (_fixed((_RATES, "rate(first) / rate(run)")), "this is the time that is left"),
        (_fixed((_PEAKS, "min(run.peak_bytes) / min(first.peak_bytes)")), "the largest peak, not the least"),
        (_fixed((_PEAKS, "max(first.peak_bytes) / max(run.peak_bytes)")), "memory is what is left"),
        (
            _fixed((_PEAKS, "max(a / b for a, b in zip(run.peak_bytes, first.peak_bytes))")),
            "on the same prompt is another question",
        ),
        (_fixed((_PEAKS, "max(run.peak_bytes)")), "the memory of baseline is 1"),
        (_fixed((_RATES, "rate(run)")), "the speed-up of baseline is 1"),
        (_fixed(("in runs:", "in runs[1:]:")), "a row for each of"),
        (_fixed(("(run.name, ", "(")), "each row should be (name, speed_up, memory)"),
        (_fixed(("rate(first), memory", "rate(first), f'{memory:.0%}'")), "should be 2 numbers"),
        (_fixed(("return rows\n", "return {n: (s, m) for n, s, m in rows}\n")), "return a list of rows; got dict"),
        (_fixed(("    rows, first", "    runs.reverse()\n    rows, first")), "should stay as it is"),
    ],
}

_PREDICT_IN_BYTES = """
def predict_rung(before, after, fixed_s, bandwidth):
    fixed = fixed_s * bandwidth
    return (fixed + sum(before[p] for p in before)) / (fixed + sum(after[p] for p in after))
"""
_PREDICT_BY_SHARES = """
def predict_rung(before, after, fixed_s, bandwidth):
    whole = fixed_s + sum(before.values()) / bandwidth
    left = 1.0
    for part in set(before) | set(after):
        left -= (before.get(part, 0) - after.get(part, 0)) / bandwidth / whole
    return 1 / left
"""
_TOGETHER_BY_TABLE = """
def goes_together(rungs, on_gpu, bits, has_draft):
    forbids = {"int8": {"int4"}}
    if on_gpu:
        forbids |= {"step": {"quantized_kv"}, "quantized_kv": {"step"}}
    on = ()
    for rung in rungs:
        if rung == "bfloat16" and bits < 32 or forbids.get(rung, set()) & set(on):
            continue
        if rung == "speculation" and not (has_draft and "step" in on):
            continue
        on += (rung,)
    return on
"""
_CHOOSE_BY_SORTING = """
def choose_stack(steps, memory_limit, max_loss):
    for s in sorted(steps, key=lambda s: (s.tokens_per_second, -s.loss, -s.peak_bytes), reverse=True):
        if max(s.peak_bytes - memory_limit, s.loss - max_loss) <= 0:
            return s.name
    return ""
"""
_TOP_P_BY_LOOP = """
import torch

def top_p_filter(probs, top_p):
    rows = []
    for row in probs.reshape(-1, probs.shape[-1]):
        kept, total = torch.zeros_like(row), 0.0
        for token in row.argsort(descending=True).tolist():
            if total >= top_p:
                break
            kept[token] = row[token]
            total += float(row[token])
        rows.append(kept / total)
    return torch.stack(rows).reshape(probs.shape)
"""
_TOP_P_FROM_BELOW = """
import torch

def top_p_filter(probs, top_p):
    ordered, order = probs.double().sort(-1)
    gone = ordered.cumsum(-1) <= 1 - top_p + 1e-12
    gone[..., -1] = False
    kept = torch.where(gone, 0.0, ordered)
    return torch.empty_like(kept).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
"""
_LOAD_IN_NUMPY = """
import numpy as np

def read_load(levels):
    rows = {}
    for n in sorted(levels):
        done = [r for r in levels[n] if len(r.times)]
        span = np.ptp([t for r in done for t in (r.sent, *r.times)])
        ttft = np.mean([r.times[0] - r.sent for r in done])
        tpot = np.mean([np.diff(r.times).mean() for r in done if len(r.times) > 1])
        rows[n] = [ttft, tpot, len(done) / span, sum(map(len, (r.times for r in done))) / span]
    order, knee = list(rows), list(rows)[0]
    while knee != order[-1] and rows[order[order.index(knee) + 1]][3] >= 1.1 * rows[knee][3]:
        knee = order[order.index(knee) + 1]
    return [rows, knee]
"""
_FIXED_IN_NUMPY = """
import numpy as np

def fixed_ladder(runs):
    rates = np.array([np.sum(run.tokens) / np.sum(run.seconds) for run in runs])
    peaks = np.array([np.max(run.peak_bytes) for run in runs])
    return tuple(zip([run.name for run in runs], rates / rates[0], peaks / peaks[0]))
"""

ALSO_RIGHT: dict[str, list[str]] = {
    "predict_rung": [_PREDICT_IN_BYTES, _PREDICT_BY_SHARES],
    "goes_together": [_TOGETHER_BY_TABLE],
    "choose_stack": [_CHOOSE_BY_SORTING],
    "top_p_filter": [_TOP_P_BY_LOOP, _TOP_P_FROM_BELOW],
    "read_load": [_LOAD_IN_NUMPY],
    "fixed_ladder": [_FIXED_IN_NUMPY],
}
