"""Chapter 05's solutions, and wrong answers that learners give, as the text of the cells tagged `exercise:<name>`.

SOLUTIONS[name] replaces the tagged cell when the chapter is run with its solutions; STUBS[name] is an untouched one.
WRONG[name] holds pairs: a cell's text, and a phrase that the check's message must contain, naming what failed.
ALSO_RIGHT[name] holds cells that are right in another way, and must pass.
ANSWERS[name] is what is passed to `check`, as in the notebook's next cell.
"""

ANSWERS: dict[str, str] = {
    "accept_step": "accept_step",
    "residual": "residual",
    "emit": "emit",
    "best_draft_length": "best_draft_length",
    "prompt_lookup": "prompt_lookup",
    "fixed_speculation": "fixed_speculation",
}

STUBS: dict[str, str] = {
    "accept_step": """
def accept_step(drafts, q, p, uniform): ...  # return how many are accepted
""",
    "residual": """
def residual(p, q): ...  # return the distribution, in the shape of p
""",
    "emit": """
def emit(drafts, q, p, generator): ...  # return a token for each draft
""",
    "best_draft_length": """
def best_draft_length(alpha, draft_cost, verify_cost, most): ...  # return gamma, from 0 to most
""",
    "prompt_lookup": """
def prompt_lookup(tokens, max_ngram, n): ...  # return a list of at most n tokens
""",
    "fixed_speculation": """
fixed_speculation = None  # your function, with the same arguments
""",
}

SOLUTIONS: dict[str, str] = {
    "accept_step": """
def accept_step(drafts, q, p, uniform):
    for i, x in enumerate(drafts.tolist()):
        if uniform[i] >= p[i, x] / q[i, x]:
            return i
    return len(drafts)
""",
    "residual": """
import torch

def residual(p, q):
    over = (p - q).clamp(min=0)
    total = over.sum(-1, keepdim=True)
    return torch.where(total > 0, over / total, p)
""",
    "emit": """
import torch

def emit(drafts, q, p, generator):
    kept = torch.rand(len(drafts), generator=generator) < p[drafts] / q[drafts]
    left = (p - q).clamp(min=0)
    if left.sum() == 0:
        left = p
    return torch.where(kept, drafts, torch.multinomial(left, len(drafts), replacement=True, generator=generator))
""",
    "best_draft_length": """
def best_draft_length(alpha, draft_cost, verify_cost, most):
    def speedup(gamma):
        tokens = sum(alpha**i for i in range(gamma + 1))
        return tokens / (gamma * draft_cost + verify_cost(gamma + 1))

    return max(range(most + 1), key=speedup)
""",
    "prompt_lookup": """
def prompt_lookup(tokens, max_ngram, n):
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size :][:n]
    return []
""",
    "fixed_speculation": """
import torch

def fixed_speculation(target, draft, tokens, n_new, gamma, generator):
    def pick(probs):
        return int(torch.multinomial(probs, 1, generator=generator))

    tokens, end, n_tested, n_matches = list(tokens), len(tokens) + n_new, 0, 0
    while len(tokens) < end:
        drafts, q, n = [], [], 0
        for _ in range(gamma):
            q.append(draft(tokens + drafts))
            drafts.append(pick(q[-1]))
        p = target(tokens + drafts)[-gamma - 1 :]
        while n < gamma and torch.rand((), generator=generator) < p[n][drafts[n]] / q[n][drafts[n]]:
            n += 1
        n_tested, n_matches = n_tested + min(n + 1, gamma), n_matches + n
        tokens = tokens + drafts[:n]
        tokens.append(pick(p[n] if n == gamma else (p[n] - q[n]).clamp(min=0)))
    return tokens[:end], n_matches / n_tested
""",
}


def _changed(name: str, *changes: tuple[str, str]) -> str:
    """The solution with its right lines made wrong."""
    text = SOLUTIONS[name]
    for right, wrong in changes:
        assert right in text, right
        text = text.replace(right, wrong)
    return text


def _accept(*changes: tuple[str, str]) -> str:
    return _changed("accept_step", *changes)


def _residual(*changes: tuple[str, str]) -> str:
    return _changed("residual", *changes)


def _emit(*changes: tuple[str, str]) -> str:
    return _changed("emit", *changes)


def _best(*changes: tuple[str, str]) -> str:
    return _changed("best_draft_length", *changes)


def _lookup(*changes: tuple[str, str]) -> str:
    return _changed("prompt_lookup", *changes)


def _fixed(*changes: tuple[str, str]) -> str:
    return _changed("fixed_speculation", *changes)


_RATIO = "p[i, x] / q[i, x]"
_ALL_ACCEPTED = """
import torch

def accept_step(drafts, q, p, uniform):
    at = torch.arange(len(drafts))
    return int((uniform < p[at, drafts] / q[at, drafts]).sum())
"""
_LABKIT_ACCEPT = """
from labkit.speculative.acceptance import acceptance

def accept_step(drafts, q, p, uniform):
    acceptance(p[:1], p[:1])
    for i, x in enumerate(drafts.tolist()):
        if uniform[i] >= p[i, x] / q[i, x]:
            return i
    return len(drafts)
"""
_LABKIT_RESIDUAL = """
from labkit.speculative import acceptance

def residual(p, q):
    return acceptance.residual(p, q)
"""
_TRANSFORMERS_LOOKUP = """
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

def prompt_lookup(tokens, max_ngram, n):
    found = PromptLookupCandidateGenerator(None, n, max_ngram, 1000).get_candidates(torch.tensor([tokens]))[0]
    return found[0, len(tokens) :].tolist()
"""
_NO_DRAFT = """
import torch

def emit(drafts, q, p, generator):
    return torch.multinomial(p, len(drafts), replacement=True, generator=generator)
"""
_WITHOUT_SPECULATION = """
import torch

def fixed_speculation(target, draft, tokens, n_new, gamma, generator):
    tokens = list(tokens)
    for _ in range(n_new):
        tokens.append(int(torch.multinomial(target(tokens)[-1], 1, generator=generator)))
    return tokens, 1.0
"""
_SPINS = """
def fixed_speculation(target, draft, tokens, n_new, gamma, generator):
    while True:
        try:
            draft(tokens)
        except Exception:
            pass
"""
_LATE = ("[-gamma - 1 :]", "[-gamma:]")
_RESAMPLE = (
    "tokens.append(pick(p[n] if n == gamma else (p[n] - q[n]).clamp(min=0)))",
    "if n == gamma:\n            tokens.append(pick(p[-1]))",
)
_BONUS_IS_LAST = ("pick(p[n] if", "pick(p[-1] if")
_RULE = "p[n][drafts[n]] / q[n][drafts[n]]"

WRONG: dict[str, list[tuple[str, str]]] = {
    "accept_step": [
        (_ALL_ACCEPTED, "count those before the first rejection"),
        (_accept(("return i\n", "return i + 1\n")), "a rejected token is not accepted"),
        (
            _accept(("return i\n", "return i + 1\n"), ("return len(drafts)", "return len(drafts) + 1")),
            "counts the token that the target adds",
        ),
        (_accept((_RATIO, "p[i, x]")), "forgets q"),
        (_accept((_RATIO, "p[i, x] / (p[i, x] + 1e-10)")), "p is divided by itself"),
        (_accept((_RATIO, "p[i + 1, x] / q[i, x]")), "p is read one position late"),
        (_accept((_RATIO, "q[i, x] / p[i, x]")), "p and q changed places"),
        (_accept((">= p", "< p")), "with the probability of a rejection"),
        (_accept(("uniform[i] >= p[i, x] / q[i, x]", "p[i, x] < q[i, x]")), "by chance, not always"),
        (_accept((_RATIO, "q[i, x]")), "q alone says nothing"),
        (_accept((">= p", "> p")), "even by the uniform number 0"),
        (_accept(("uniform[i] >= p[i, x] / q[i, x]", "p[i].argmax() != x")), "should be accepted, and yours says"),
        (_accept(("uniform[i]", "uniform[0]")), "should be accepted, and yours says"),
        (_accept((_RATIO, "p[0, x] / q[0, x]")), "should be accepted, and yours says"),
        (_accept(("    for i", "    p /= p.sum() + 1\n    for i")), "changed a tensor in place"),
        (_accept(("return len(drafts)", "return drafts")), "should be a whole number"),
        (_accept(("return len(drafts)", "return 0.5")), "should be a whole number from 0 to"),
        (_LABKIT_ACCEPT, "your function called labkit's own acceptance"),
    ],
    "residual": [
        (_residual(("over / total, p)", "over, p)")), "divide by what is left over"),
        (_residual(("over / total", "over / over.sum()")), "divide each row by its own sum"),
        (_residual(("(p - q).clamp", "(q - p).clamp")), "this is left over from q"),
        (_residual(("(p - q).clamp(min=0)", "(p - q).abs()")), "not its absolute value"),
        (_residual(("return torch.where(total > 0, over / total, p)", "return p - q")), "cut it there"),
        (_residual(("(p - q).clamp(min=0)", "(p - q)")), "this is p: drawn from it after a rejection"),
        (_residual(("over / total", "over.softmax(-1)")), "these are already probabilities"),
        (_residual(("over / total", "(p - q).softmax(-1)")), "a softmax of the difference"),
        (_residual(("over / total", "p")), "drawn from it after a rejection, the output leans"),
        (_residual(("over / total", "q")), "this is q, the draft's"),
        (_residual(("(p - q).clamp(min=0)", "p * (p > q)")), "not p itself"),
        (_residual(("return torch.where(total > 0, over / total, p)", "return over / total")), "0/0 is not a number"),
        (_residual(("over / total, p)", "over / total, 1 / p.shape[-1])")), "where p equals q in some rows, return p"),
        (_residual(("over / total, p)", "over / total, 0.0)")), "where p equals q in some rows, return p"),
        (
            _residual(("torch.where(total > 0, over / total, p)", "over / total if total.all() else p")),
            "the other rows should be as without them",
        ),
        (_residual(("over / total, p)", "over / (total + 1e-6), p)")), "should still sum to 1"),
        (_residual(("total > 0", "total > 1e-4")), "should still sum to 1"),
        (_residual(("clamp(min=0)", "clamp(min=1e-4)")), "should be max(0, p - q), divided by its sum"),
        (_residual(("(p - q).clamp(min=0)", "p.sub_(q).clamp(min=0)")), "changed a tensor in place"),
        (_residual(("sum(-1, keepdim=True)", "sum(0, keepdim=True)")), "should be max(0, p - q)"),
        (
            _residual(
                ("(p - q).clamp(min=0)", "(p - q).clamp(min=0)\n    over = over.masked_fill(q == 0, 0)"),
                ("over / total, p)", "over / total, 1 / p.shape[-1])"),
            ),
            "where p and q have no token in common, all of p is left",
        ),
        (
            _residual(("total > 0,", "(total > 0) & (q < 1).all(-1, keepdim=True),")),
            "what is left is p without that token",
        ),
        (_LABKIT_RESIDUAL, "your function called labkit's own residual"),
    ],
    "emit": [
        (
            _emit(("    return torch.where", "    return drafts\n    return torch.where")),
            "the drafts come out as they are",
        ),
        (_NO_DRAFT, "accept each draft with probability min(1, p/q)"),
        (_emit(("(p - q).clamp(min=0)", "p")), "you seem to draw from p"),
        (_emit(("(p - q).clamp(min=0)", "q")), "you seem to draw from q again"),
        (_emit(("p[drafts] / q[drafts]", "p[drafts]")), "you seem to accept with p alone"),
        (
            _emit(("p[drafts] / q[drafts]", "p[drafts]"), ("(p - q).clamp(min=0)", "p")),
            "accept with p alone and to draw from p",
        ),
        (_emit(("p[drafts] / q[drafts]", "p[drafts] / (p[drafts] + 1e-10)")), "the drafts come out as they are"),
        (_emit(("p[drafts] / q[drafts]", "q[drafts] / p[drafts]")), "and what comes out is"),
        (_emit(("(p - q).clamp(min=0)", "(q - p).clamp(min=0)")), "p is [0.4, 0.3, 0.2, 0.1], and what comes out"),
        (_emit(("(p - q).clamp(min=0)", "(p - q).abs()")), "and what comes out is"),
        (
            _emit(("< p[drafts] / q[drafts]", "<= p[drafts] / q[drafts] + 1e-3")),
            "tokens came out that the target never",
        ),
        (_emit(("torch.rand(len(drafts)", "torch.rand(1")), "and what comes out is"),
        (_emit(("torch.rand(len(drafts), generator=generator)", "torch.rand(len(drafts))")), "the same generator gave"),
        (
            _emit(("replacement=True, generator=generator", "replacement=True")),
            "the same generator gave other tokens",
        ),
        (_emit(("    kept", "    generator.manual_seed(0)\n    kept")), "another generator gave the same tokens"),
        (_emit(("p[drafts] / q[drafts]", "0.999 * p[drafts] / q[drafts]")), "where q equals p every draft should"),
        (
            _emit(("    if left.sum() == 0:\n        left = p\n", "")),
            "your function raised RuntimeError",
        ),
        (_emit(("torch.multinomial(left, len", "torch.multinomial(left, 1 + 0 * len")), "p is [0.4, 0.3, 0.2, 0.1]"),
        (_emit(("return torch.where", "return 1.0 * torch.where")), "tokens are whole numbers; got torch.float32"),
        (_emit(("generator=generator))", "generator=generator))[:10]")), "each becomes one token"),
        (_emit(("generator=generator))", "generator=generator)) + 1")), "tokens are numbers from 0 to 3"),
        (_emit(("generator=generator))", "generator=generator)).tolist()")), "return a tensor with a token for each"),
        (_emit(("    kept", "    q += 0.1\n    kept")), "changed a tensor in place"),
    ],
    "best_draft_length": [
        (_best(("range(most + 1), key", "range(1, most + 1), key")), "the best length is 0"),
        (_best(("verify_cost(gamma + 1)", "1")), "costs verify_cost(gamma + 1), and not 1"),
        (_best(("verify_cost(gamma + 1)", "verify_cost(max(1, gamma))")), "the last verified one and the drafts"),
        (_best(("verify_cost(gamma + 1)", "verify_cost(gamma)")), "verify_cost was measured for 1 to 17 tokens"),
        (_best(("verify_cost(gamma + 1)", "verify_cost(most + 2)")), "and asked for 18"),
        (_best(("gamma * draft_cost + ", "")), "drafting takes time, too"),
        (_best(("gamma * draft_cost", "(gamma > 0) * draft_cost")), "each drafted token costs draft_cost"),
        (_best(("in range(gamma + 1))", "in range(1, gamma + 1))")), "a call gives one token more than it accepts"),
        (_best(("sum(alpha**i for i in range(gamma + 1))", "1 + alpha * gamma")), "a draft is worth nothing once"),
        (
            _best(("sum(alpha**i for i in range(gamma + 1))", "(1 - alpha ** (gamma + 1)) / (1 - alpha)")),
            "your function raised ZeroDivisionError",
        ),
        (_best(("sum(alpha**i for i in range(gamma + 1))", "1 / (1 - alpha + 1e-9)")), "drafted tokens give"),
        (
            _best(
                (
                    "return max(range(most + 1), key=speedup)",
                    "gamma = 0\n    while gamma < most and speedup(gamma + 1) > speedup(gamma):\n        gamma += 1\n"
                    "    return gamma",
                )
            ),
            "the first peak need not be the highest",
        ),
        (
            _best(("return tokens / (gamma * draft_cost + verify_cost(gamma + 1))", "return tokens")),
            "most tokens a call",
        ),
        (_best(("range(most + 1), key", "range(most), key")), "drafted tokens give"),
        (
            _best(("return max(range(most + 1), key=speedup)", "return speedup(4)")),
            "should be a whole number from 0 to",
        ),
        (_best(("max(range", "min(range")), "drafted tokens give"),
    ],
    "prompt_lookup": [
        (_lookup(("in range(len(tokens) - size)", "in range(len(tokens) - size, -1, -1)")), "always matches itself"),
        (_lookup(("in range(len(tokens) - size)", "in range(len(tokens) - size + 1)")), "nowhere but at the end"),
        (_lookup(("in range(len(tokens) - size)", "in reversed(range(len(tokens) - size))")), "take the first"),
        (
            _lookup(("range(min(max_ngram, len(tokens) - 1), 0, -1)", "range(1, min(max_ngram, len(tokens) - 1) + 1)")),
            "try the longest n-gram first",
        ),
        (_lookup(("range(min(max_ngram, len(tokens) - 1), 0, -1)", "[max_ngram]")), "a shorter n-gram may stand twice"),
        (_lookup(("min(max_ngram, len(tokens) - 1)", "len(tokens) - 1")), "no n-gram is longer than max_ngram"),
        (_lookup(("1), 0, -1)", "1), 1, -1)")), "a single token is an n-gram"),
        (_lookup(("in range(len(tokens) - size)", "in range(len(tokens) - 2 * size + 1)")), "may overlap with the end"),
        (_lookup(("[start + size :]", "[start + size + 1 :]")), "begins right after the n-gram"),
        (_lookup(("[start + size :]", "[start:]")), "without it"),
        (_lookup(("[:n]", "")), "at most n tokens"),
        (_lookup(("return []", "return tokens[:n]")), "the draft is []"),
        (_lookup(("return []", "return None")), "your function returned nothing for some arguments"),
        (_lookup(("in range(len(tokens) - size)", "in range(1, len(tokens) - size)")), "the draft is"),
        (
            _lookup(("return tokens[start + size :][:n]", "return (n * tokens[start + size :])[:n]")),
            "where it ends, the draft ends",
        ),
        (_lookup(("for size", "tokens.append(0)\n    tokens.pop(0)\n    for size")), "should stay as it is"),
        (_lookup(("return []", 'return "none"')), "return a list of tokens; got str"),
        (_TRANSFORMERS_LOOKUP, "your function called transformers'"),
    ],
    "fixed_speculation": [
        (_fixed(_LATE, _RESAMPLE), "the loop does not end"),
        (_fixed(_RESAMPLE), "the loop does not end"),
        (_fixed(_LATE, _BONUS_IS_LAST), "a draft that equals the target is accepted whole; yours was rejected"),
        (_fixed((_RULE, "p[n][drafts[n]] / (p[n][drafts[n]] + 1e-10)")), "the first of them are the draft's"),
        (_fixed((_RULE, "p[n][drafts[n]]")), "your function raised RuntimeError"),
        (
            _fixed((_RULE, "p[n][drafts[n]]"), ("(p[n] - q[n]).clamp(min=0)", "p[n]")),
            "everything should be accepted; your rate",
        ),
        (_fixed((_RULE, "q[n][drafts[n]] / p[n][drafts[n]]")), "which the target never gives, came out"),
        (_fixed(("n_matches + n\n", "n_matches + n + 1\n")), "everything should be accepted; your rate is"),
        (_fixed(("n_matches + n\n", "n_matches + min(n + 1, gamma)\n")), "none of its tokens is accepted"),
        (_fixed(("n_tested + min(n + 1, gamma)", "n_tested + gamma")), "what follows a rejection was not tested"),
        (
            _fixed(("n_tested + min(n + 1, gamma), n_matches + n", "n_tested + 1, n_matches + (n == gamma)")),
            "accepted drafts over those that a verdict was given on",
        ),
        (
            _fixed(
                ("n_tested + min(n + 1, gamma), n_matches + n", "n_tested + gamma + 1, n_matches + n + (n == gamma)")
            ),
            "your acceptance rate is",
        ),
        (_fixed(("(p[n] - q[n]).clamp(min=0)", "p[n]")), "should come as often as the target gives them"),
        (_fixed(("(p[n] - q[n]).clamp(min=0)", "q[n]")), "which the target never gives, came out"),
        (_fixed(("else (p[n] - q[n])", "else (p[n - 1] - q[n - 1])")), "should come as often as the target gives them"),
        (_fixed(("pick(p[n] if n", "pick(q[-1] if n")), "should come as often as the target gives them"),
        (
            _fixed(("tokens.append(pick", "if n < gamma:\n            tokens.append(pick")),
            "a call gives gamma + 1 tokens",
        ),
        (
            _fixed(("q.append(draft(tokens + drafts))", "q.append(draft(tokens))")),
            "equals the target is accepted whole",
        ),
        (
            _fixed(("tokens = tokens + drafts[:n]", "tokens = tokens + drafts")),
            "which the target never gives, came out",
        ),
        (_fixed(("tokens[:end]", "tokens")), "new tokens were asked for"),
        (
            _fixed(("list(tokens), len", "tokens, len"), ("tokens = tokens + drafts[:n]", "tokens += drafts[:n]")),
            "stay",
        ),
        (_fixed(("return tokens[:end], n_matches / n_tested", "return tokens[:end]")), "return two things"),
        (_fixed(("return tokens[:end],", "return tokens[:end][::-1],")), "should begin with those that you were given"),
        (
            _fixed(("tokens.append(pick", "_ = target(tokens) if n < gamma else None\n        tokens.append(pick")),
            "each call should give one token, the target's own, so that 8 take 8 calls",
        ),
        (_WITHOUT_SPECULATION, "a call gives gamma + 1 tokens"),
        (_SPINS, "the loop does not end"),
    ],
}

_ACCEPT_AT_ONCE = """
import torch

def accept_step(drafts, q, p, uniform):
    q, p = (x[: len(drafts)].gather(1, drafts[:, None]).squeeze(1) for x in (q, p))
    return (uniform * q < p).long().cumprod(0).sum()
"""
_ACCEPT_IN_LOGS = """
import math

def accept_step(drafts, q, p, uniform):
    n = 0
    for x, of_q, of_p, u in zip(drafts, q, p, uniform):
        if of_p[x] == 0 or (u > 0 and math.log(u) >= math.log(of_p[x]) - math.log(of_q[x])):
            break
        n += 1
    return n
"""
_RESIDUAL_BY_MINIMUM = """
import torch

def residual(p, q):
    left = p.double() - torch.minimum(p, q).double()
    total = left.sum(-1, keepdim=True)
    return torch.where(total == 0, p.double(), left / total.clamp(min=1e-300)).float()
"""
_RESIDUAL_IN_NUMPY = """
import numpy as np
import torch

def residual(p, q):
    over = np.maximum(p.numpy() - q.numpy(), 0)
    total = over.sum(-1, keepdims=True)
    return torch.from_numpy(np.where(total > 0, over / np.where(total > 0, total, 1), p.numpy()))
"""
_EMIT_REJECTED_ALONE = """
import torch

def emit(drafts, q, p, generator):
    tokens = drafts.clone()
    rejected = torch.rand(len(drafts), generator=generator) * q[drafts] >= p[drafts]
    if rejected.any():
        tokens[rejected] = torch.multinomial((p - q).clamp(min=0), int(rejected.sum()), True, generator=generator)
    return tokens
"""
_EMIT_BY_SUMS = """
import torch

def emit(drafts, q, p, generator):
    u, v = torch.rand(2, len(drafts), generator=generator, dtype=torch.float64)
    left = (p.double() - q.double()).clamp(min=0).cumsum(0)
    drawn = torch.searchsorted(left, v * left[-1], right=True).clamp(max=len(p) - 1)
    return torch.where(u < (p / q)[drafts], drafts, drawn)
"""
_BEST_BY_LOOP = """
def best_draft_length(alpha, draft_cost, verify_cost, most):
    best, at, tokens = 1.0, 0, 1.0
    for gamma in range(1, most + 1):
        tokens = 1 + alpha * tokens
        speedup = tokens / (verify_cost(1 + gamma) + draft_cost * gamma)
        if speedup >= best:
            best, at = speedup, gamma
    return float(at)
"""
_BEST_IN_CLOSED_FORM = """
def best_draft_length(alpha, draft_cost, verify_cost, most):
    def seconds_a_token(gamma):
        tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
        return (gamma * draft_cost + verify_cost(gamma + 1)) / tokens

    return min(range(most + 1), key=seconds_a_token)
"""
_LOOKUP_BY_LENGTH = """
def prompt_lookup(tokens, max_ngram, n):
    best, at = 0, None
    for end in range(1, len(tokens)):
        size = 0
        while size < min(max_ngram, end) and tokens[end - 1 - size] == tokens[-1 - size]:
            size += 1
        if size > best:
            best, at = size, end
    return [] if at is None else tokens[at : at + n]
"""
_LOOKUP_IN_TENSORS = """
import torch

def prompt_lookup(tokens, max_ngram, n):
    text = torch.tensor(tokens)
    for size in range(max_ngram, 0, -1):
        if size < len(text):
            found = (text.unfold(0, size, 1)[:-1] == text[-size:]).all(1).nonzero()
            if len(found):
                at = int(found[0]) + size
                return text[at : at + n]
    return text[:0]
"""
_FIXED_BY_UNIFORM = """
import torch

def fixed_speculation(target, draft, tokens, n_new, gamma, generator):
    pick = lambda probs: int(torch.multinomial(probs, 1, generator=generator))
    out, tested, matches = list(tokens), 0, 0
    while (left := n_new - (len(out) - len(tokens))) > 0:
        drafts, q = [], []
        for _ in range(min(gamma, left)):
            q.append(draft(out + drafts))
            drafts.append(pick(q[-1]))
        p = target(out + drafts)[len(out) - 1 :]
        for x, of_q, of_p in zip(drafts, q, p):
            tested += 1
            if torch.rand((), generator=generator) * of_q[x] < of_p[x]:
                out.append(x)
                matches += 1
                continue
            over = (of_p - of_q).clamp(min=0)
            out.append(pick(over if over.sum() > 0 else of_p))
            break
        else:
            out.append(pick(p[-1]))
    return torch.tensor(out[: len(tokens) + n_new]), torch.tensor(matches / tested)
"""

ALSO_RIGHT: dict[str, list[str]] = {
    "accept_step": [_ACCEPT_AT_ONCE, _ACCEPT_IN_LOGS],
    "residual": [_RESIDUAL_BY_MINIMUM, _RESIDUAL_IN_NUMPY],
    "emit": [_EMIT_REJECTED_ALONE, _EMIT_BY_SUMS],
    "best_draft_length": [_BEST_BY_LOOP, _BEST_IN_CLOSED_FORM],
    "prompt_lookup": [_LOOKUP_BY_LENGTH, _LOOKUP_IN_TENSORS],
    "fixed_speculation": [_FIXED_BY_UNIFORM],
}
