"""Chapter 04's solutions, and wrong answers that learners give, as the text of the cells tagged `exercise:<name>`.

SOLUTIONS[name] replaces the tagged cell when the chapter is run with its solutions; STUBS[name] is an untouched one.
WRONG[name] holds pairs: a cell's text, and a phrase that the check's message must contain, naming what failed.
ALSO_RIGHT[name] holds cells that are right in another way, and must pass.
ANSWERS[name] is what is passed to `check`, as in the notebook's next cell.
"""

ANSWERS: dict[str, str] = {
    "attention_traffic": "attention_traffic",
    "online_softmax": "online_softmax",
    "tiled_attention": "tiled_attention",
    "block_backward": "block_backward",
    "fixed_flash_attention": "fixed_flash_attention",
}

STUBS: dict[str, str] = {
    "attention_traffic": """
def attention_traffic(q_len, kv_len, head_dim, block_q, bytes_per_element):
    ...  # return (standard_bytes, flash_bytes)
""",
    "online_softmax": """
def online_softmax(state, scores, values):
    maximum, total, weighted = state
    ...  # return the state with this block taken in
""",
    "tiled_attention": """
def tiled_attention(query, key, value, block_size, causal):
    ...  # return the output
""",
    "block_backward": """
def block_backward(query, key, value, output, grad_output, lse, softmax_scale):
    ...  # return (grad_query, grad_key, grad_value)
""",
    "fixed_flash_attention": """
fixed_flash_attention = None  # your function, with the same arguments
""",
}

SOLUTIONS: dict[str, str] = {
    "attention_traffic": """
def attention_traffic(q_len, kv_len, head_dim, block_q, bytes_per_element):
    queries, keys = 2 * q_len * head_dim, 2 * kv_len * head_dim
    standard = (4 * q_len * kv_len + queries + keys) * bytes_per_element
    blocks = -(-q_len // block_q)
    flash = (queries + blocks * keys) * bytes_per_element
    return standard, flash + 4 * q_len
""",
    "online_softmax": """
import torch

def online_softmax(state, scores, values):
    maximum, total, weighted = state
    new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
    base = new.masked_fill(new == float("-inf"), 0)
    weights, rescale = (scores - base).exp(), (maximum - base).exp()
    total = total * rescale + weights.sum(-1, keepdim=True)
    weighted = weighted * rescale + weights @ values
    return new, total, weighted
""",
    "tiled_attention": """
import torch

def tiled_attention(query, key, value, block_size, causal):
    q_len, kv_len = query.shape[2], key.shape[2]
    rows = torch.arange(q_len)[:, None] + kv_len - q_len
    maximum = torch.full((*query.shape[:3], 1), float("-inf"))
    total, weighted = torch.zeros_like(maximum), torch.zeros_like(query)
    for start in range(0, kv_len, block_size):
        stop = min(start + block_size, kv_len)
        scores = query @ key[:, :, start:stop].mT / query.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.arange(start, stop) > rows, float("-inf"))
        new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        base = new.masked_fill(new == float("-inf"), 0)
        weights, rescale = (scores - base).exp(), (maximum - base).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        weighted = weighted * rescale + weights @ value[:, :, start:stop]
        maximum = new
    return weighted / total.masked_fill(total == 0, 1)
""",
    "block_backward": """
def block_backward(query, key, value, output, grad_output, lse, softmax_scale):
    weights = (query @ key.T * softmax_scale - lse[:, None]).exp()
    delta = (output * grad_output).sum(-1, keepdim=True)
    grad_scores = weights * (grad_output @ value.T - delta)
    grad_query = grad_scores @ key * softmax_scale
    grad_key = grad_scores.T @ query * softmax_scale
    return grad_query, grad_key, weights.T @ grad_output
""",
    "fixed_flash_attention": """
import torch

def fixed_flash_attention(query, key, value, padding_mask=None, block_size=16):
    groups, q_len, kv_len = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    maximum = torch.full((*query.shape[:3], 1), float("-inf"))
    total, output = torch.zeros_like(maximum), torch.zeros_like(query)
    rows = torch.arange(q_len)[:, None] + kv_len - q_len
    for start in range(0, kv_len, block_size):
        block = slice(start, start + block_size)
        scores = query @ key[:, :, block].mT / query.shape[-1] ** 0.5
        columns = torch.arange(kv_len)[block]
        scores = scores.masked_fill(columns > rows, float("-inf"))
        if padding_mask is not None:
            scores = scores.masked_fill(~padding_mask[:, None, None, block], float("-inf"))
        new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        base = new.masked_fill(new == float("-inf"), 0)
        weights, rescale = (scores - base).exp(), (maximum - base).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        output = output * rescale + weights @ value[:, :, block]
        maximum = new
    return output / total.masked_fill(total == 0, 1)
""",
}


def _changed(name: str, *changes: tuple[str, str]) -> str:
    """The solution with its right lines made wrong."""
    text = SOLUTIONS[name]
    for right, wrong in changes:
        assert right in text, right
        text = text.replace(right, wrong)
    return text


def _traffic(*changes: tuple[str, str]) -> str:
    return _changed("attention_traffic", *changes)


def _softmax(*changes: tuple[str, str]) -> str:
    return _changed("online_softmax", *changes)


def _tiles(*changes: tuple[str, str]) -> str:
    return _changed("tiled_attention", *changes)


def _backward(*changes: tuple[str, str]) -> str:
    return _changed("block_backward", *changes)


def _fixed(*changes: tuple[str, str]) -> str:
    return _changed("fixed_flash_attention", *changes)


_BASE = ('new.masked_fill(new == float("-inf"), 0)', "new")
_STANDARD = """
import torch

def tiled_attention(query, key, value, block_size, causal):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    q_len, kv_len = scores.shape[-2:]
    if causal:
        scores = scores.masked_fill(torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1), -1e30)
        blind = torch.arange(q_len)[:, None] + kv_len - q_len < 0
        return (scores.softmax(-1) @ value).masked_fill(blind, 0)
    return scores.softmax(-1) @ value
"""
_ROW_BY_ROW = """
import torch

def tiled_attention(query, key, value, block_size, causal):
    out = torch.zeros_like(query)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                last = i + key.shape[2] - query.shape[2] if causal else key.shape[2] - 1
                if last >= 0:
                    scores = key[b, h] @ query[b, h, i] / query.shape[-1] ** 0.5
                    scores[last + 1 :] = float("-inf")
                    out[b, h, i] = scores.softmax(0) @ value[b, h]
    return out
"""
_SDPA = """
import torch
import torch.nn.functional as F

def tiled_attention(query, key, value, block_size, causal):
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    if causal:
        mask = mask.tril(key.shape[2] - query.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
"""
_ATEN = """
import torch

def tiled_attention(query, key, value, block_size, causal):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)[0]
"""
_KEPT_TILES = """
import torch

def tiled_attention(query, key, value, block_size, causal):
    q_len, kv_len = query.shape[2], key.shape[2]
    rows = torch.arange(q_len)[:, None] + kv_len - q_len
    tiles = []
    for start in range(0, kv_len, block_size):
        scores = query @ key[:, :, start : start + block_size].mT / query.shape[-1] ** 0.5
        if causal:
            columns = torch.arange(start, start + scores.shape[-1])
            scores = scores.masked_fill(columns > rows, float("-inf"))
        tiles.append(scores)
    maximum = torch.stack([t.amax(-1) for t in tiles]).amax(0)[..., None].clamp(min=-1e30)
    total = sum((t - maximum).exp().sum(-1, keepdim=True) for t in tiles)
    values = value.split(block_size, 2)
    weighted = sum((t - maximum).exp() @ v for t, v in zip(tiles, values))
    return weighted / total.clamp(min=1e-30)
"""
_PADDED = """
import torch

def tiled_attention(query, key, value, block_size, causal):
    q_len, kv_len = query.shape[2], key.shape[2]
    rows = torch.arange(q_len)[:, None] + kv_len - q_len
    key = torch.nn.functional.pad(key, (0, 0, 0, -kv_len % block_size))
    value = torch.nn.functional.pad(value, (0, 0, 0, -kv_len % block_size))
    maximum, total, weighted = -1e30, 0, 0
    for start in range(0, key.shape[2], block_size):
        scores = query @ key[:, :, start : start + block_size].mT / query.shape[-1] ** 0.5
        columns = torch.arange(start, start + block_size)
        if causal:
            scores = scores.masked_fill(columns > rows, float("-inf"))
        new = scores.amax(-1, keepdim=True).clamp(min=-1e30) + 0
        new = torch.maximum(new, torch.as_tensor(maximum))
        weights, rescale = (scores - new).exp(), (maximum - new).exp()
        total, weighted = total * rescale + weights.sum(-1, keepdim=True), weighted * rescale + weights @ value[
            :, :, start : start + block_size
        ]
        maximum = new
    return weighted / torch.as_tensor(total).clamp(min=1e-30)
"""
_FULL_MASK = (
    "scores.masked_fill(torch.arange(start, stop) > rows",
    "scores.masked_fill((torch.arange(kv_len) > rows)[:, start:stop]",
)
_BUGGY_FLASH = _fixed(
    ("repeat_interleave(groups, dim=1)", "repeat(1, groups, 1, 1)"),
    ("[:, None] + kv_len - q_len", "[:, None]"),
    ("output * rescale", "output"),
    _BASE,
    ("total.masked_fill(total == 0, 1)", "total"),
)
_FIXED_SDPA = """
import torch
import torch.nn.functional as F

def fixed_flash_attention(query, key, value, padding_mask=None, block_size=16):
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    if padding_mask is not None:
        mask = mask & padding_mask[:, None, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
"""
_FIXED_STANDARD = """
import torch

def fixed_flash_attention(query, key, value, padding_mask=None, block_size=16):
    groups = query.shape[1] // key.shape[1]
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    if padding_mask is not None:
        mask = mask & padding_mask[:, None, None]
    scores = query @ key.repeat_interleave(groups, 1).mT / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).masked_fill(~mask, 0)
    return weights @ value.repeat_interleave(groups, 1)
"""

WRONG: dict[str, list[tuple[str, str]]] = {
    "attention_traffic": [
        (_traffic(("4 * q_len * kv_len", "2 * q_len * kv_len")), "the matrix crosses four times"),
        (_traffic(("4 * q_len * kv_len", "3 * q_len * kv_len")), "four crossings"),
        (_traffic(("4 * q_len * kv_len + queries + keys", "4 * q_len * kv_len")), "count Q, K, V and the output"),
        (_traffic(("4 * q_len * kv_len + queries", "queries")), "the matrix never stays on the chip here"),
        (_traffic(("queries + keys) * bytes_per_element", "queries + keys)")), "standard attention moves 8,912,896"),
        (_traffic(("queries + keys)", "queries / 2 + keys)")), "the output is written, too"),
        (_traffic(("4 * q_len * kv_len", "4 * kv_len * kv_len")), "300 queries in blocks of 128, 1000 keys"),
        (_traffic(("blocks * keys", "keys")), "each block of queries reads them again"),
        (_traffic(("-(-q_len // block_q)", "q_len // block_q")), "a ragged last block"),
        (_traffic(("-(-q_len // block_q)", "q_len / block_q")), "300 queries in blocks of 128"),
        (_traffic(("-(-q_len // block_q)", "q_len")), "not each of its rows"),
        (_traffic(("-(-q_len // block_q)", "-(-kv_len // block_q)")), "300 queries in blocks of 128"),
        (_traffic((" + 4 * q_len\n", "\n")), "a statistic of 4 bytes a row"),
        (_traffic((" + 4 * q_len\n", " + q_len * bytes_per_element\n")), "the statistic is float32"),
        (_traffic(("blocks * keys)", "blocks * keys / 2)")), "both K and V are read"),
        (_traffic(("queries + blocks * keys", "blocks * queries + keys")), "it is K and V that come again"),
        (_traffic(("blocks * keys) * bytes_per_element", "blocks * keys)")), "each takes bytes_per_element"),
        (_traffic(("return standard, flash + 4", "return flash, standard + 4")), "standard attention moves"),
        (_traffic(("return standard, flash + 4 * q_len", "return standard")), "return two numbers"),
        (
            """
from labkit.attention.traffic import AttentionShape, flash_cost, standard_costs

def attention_traffic(q_len, kv_len, head_dim, block_q, bytes_per_element):
    shape = AttentionShape(1, 1, 1, q_len, kv_len, head_dim, False)
    dtype = "float16" if bytes_per_element == 2 else "float32"
    return sum(c.bytes for c in standard_costs(shape, dtype)), flash_cost(shape, dtype, (block_q, 64)).bytes
""",
            "write it yourself: your function called labkit's own",
        ),
    ],
    "online_softmax": [
        (_softmax(("weighted * rescale", "weighted")), "weighted still holds terms under the old maximum"),
        (_softmax(("total * rescale", "total")), "total still holds terms under the old maximum"),
        (_softmax(("(maximum - base).exp()", "(base - maximum).exp()")), "should be finite"),
        (
            _softmax(("(maximum - base).exp()", "(base - maximum).exp().nan_to_num(posinf=0)")),
            "total was moved the wrong way",
        ),
        (
            _softmax(("weighted * rescale", "weighted / rescale.clamp(min=1e-30)")),
            "what was summed before was moved the wrong way",
        ),
        (
            _softmax(("torch.maximum(maximum, scores.amax(-1, keepdim=True))", "scores.amax(-1, keepdim=True)")),
            "maximum should be the largest score of the row so far",
        ),
        (
            _softmax(
                ("scores.amax(-1, keepdim=True))", "scores.max())"),
            ),
            "maximum should be the largest score of the row so far",
        ),
        (_softmax(("return new, total, weighted", "return new, total, weighted / total")), "after a first block"),
        (
            _softmax(("weighted * rescale", "weighted * state[1] * rescale"), ("weighted\n", "weighted / total\n")),
            "weighted should be the sum of exp(score - maximum) times the value",
        ),
        (_softmax(("total * rescale + ", "")), "total holds the last block alone"),
        (_softmax(("weighted * rescale + ", "")), "weighted holds the last block alone"),
        (_softmax(("return new, total", "return maximum, total")), "maximum should be the largest score"),
        (
            _softmax(("(scores - base).exp(), (maximum - base).exp()", "scores.exp(), (maximum - maximum).exp()")),
            "should be finite",
        ),
        (
            _softmax(
                ("(scores - base).exp(), (maximum - base).exp()", "scores.exp(), torch.ones_like(maximum)"),
            ),
            "total should be the sum of exp(score - maximum)",
        ),
        (
            _softmax(
                (
                    "return new, total, weighted",
                    "scale = new.exp()\n    return new, total, weighted",
                ),
                (
                    "(scores - base).exp(), (maximum - base).exp()",
                    "scores.exp() / base.exp(), maximum.exp() / base.exp()",
                ),
            ),
            "exp of such a score overflows",
        ),
        (
            _softmax(("    new = ", "    if scores.shape[-1] == 1:\n        return state\n    new = ")),
            "scores in blocks of",
        ),
        (
            _softmax(
                ("total, weighted\n", "total * live, weighted * live\n"),
                ("    total = ", "    live = scores.amax(-1, keepdim=True) > float('-inf')\n    total = "),
            ),
            "should leave that row's state as it was: total and weighted changed",
        ),
        (_softmax(_BASE), "where a row's scores are all -inf (-inf - -inf is NaN)"),
        (
            _softmax(("return new,", "new = base\n    return new,")),
            "a row that has seen only -inf has no maximum yet",
        ),
        (
            _softmax(
                ('float("-inf"), 0)', 'float("-inf"), 0)\n    scores = scores.clamp(min=-1e30)'),
                (
                    "new = torch.maximum(maximum, scores.amax(-1, keepdim=True))",
                    ("new = torch.maximum(maximum, scores.amax(-1, keepdim=True)).clamp(min=-1e30)"),
                ),
            ),
            "a row that has seen only -inf has seen nothing: its total and weighted should be 0",
        ),
        (_softmax(("return new, total, weighted", "return new, total")), "return three things"),
        (_softmax((", keepdim=True)\n    weighted", ")\n    weighted")), "should have the shape"),
        (_softmax(("weights @ values", "scores.softmax(-1) @ values")), "weighted should be the sum"),
        (_softmax(("(scores - base).exp(),", "torch.exp2(scores - base),")), "total should be the sum of exp"),
    ],
    "tiled_attention": [
        (_STANDARD, "a tensor of (1, 1, 257, 389) was made: hold the scores of one block"),
        (_ROW_BY_ROW, "a tensor of (1, 389) was made: hold the scores of one block"),
        (_SDPA, "your function called scaled_dot_product_attention"),
        (_ATEN, "your function called _scaled_dot_product_flash_attention_for_cpu"),
        (_KEPT_TILES, "and so do tiles that are kept"),
        (
            _tiles(_FULL_MASK, ("torch.arange(kv_len) > rows", "torch.arange(kv_len).double() > rows.double()")),
            "a tensor of (389,) was made",
        ),
        (
            _tiles(
                _FULL_MASK,
                ("    for start", "    later = torch.arange(kv_len) > rows\n    for start"),
                ("(torch.arange(kv_len) > rows)[:,", "later[:,"),
            ),
            "a mask of that size counts",
        ),
        (_tiles(("[:, None] + kv_len - q_len", "[:, None]")), "the causal mask is laid at the start"),
        (_tiles(("        if causal:\n", "        if False:\n")), "a query sees the keys after it"),
        (_tiles(("        if causal:\n", "        if True:\n")), "where none was asked for"),
        (_tiles((" > rows", " >= rows")), "a query does not see its own key"),
        (_tiles((" / query.shape[-1] ** 0.5", "")), "divided by sqrt(head_dim)"),
        (
            _tiles(
                (
                    "range(0, kv_len, block_size)",
                    "range(max(0, kv_len - 256) // block_size * block_size, kv_len, block_size)",
                )
            ),
            "with 257 queries and 389 keys in blocks of 16, the output is not attention's",
        ),
        (_tiles(('float("-inf"))\n    total', "0.0)\n    total")), "with scores in the hundreds below zero"),
        (_tiles(("range(0, kv_len, block_size)", "range(0, 1, block_size)")), "the first block alone came through"),
        (
            _tiles(("range(0, kv_len, block_size)", "range(0, kv_len // block_size * block_size, block_size)")),
            "left out",
        ),
        (_PADDED, "the keys that fill up the last block are no keys"),
        (_tiles(("weighted * rescale", "weighted")), "the output is not attention's"),
        (_tiles(("total * rescale", "total")), "the output is not attention's"),
        (_tiles(("        maximum = new\n", "")), "the output is not attention's"),
        (_tiles(("weighted * rescale + ", "")), "the output is not attention's"),
        (_tiles(("total * rescale + ", ""), ("weighted * rescale + ", "")), "the last block alone came through"),
        (_tiles(_BASE), "where the first queries see no key and get zeros"),
        (_tiles(("total.masked_fill(total == 0, 1)", "total")), "where the first queries see no key and get zeros"),
        (
            _tiles(("(scores - base).exp(), (maximum - base).exp()", "scores.exp(), torch.ones_like(base)")),
            "with scores in the hundreds should be finite",
        ),
        (_tiles(("    return weighted", "    query *= 2\n    return weighted")), "should stay as they are"),
        (_tiles(('float("-inf"))\n        new', "-1e4)\n        new")), "the queries that see no key should get zeros"),
        (
            _tiles(("masked_fill(total == 0, 1)", "masked_fill(total == 0, 1) + 0 * total.sum()")).replace(
                "return weighted /", "return weighted.transpose(1, 2) /"
            ),
            "your function raised RuntimeError",
        ),
        (_tiles(("return weighted / ", "return weighted.mT / ")), "your function raised RuntimeError"),
        (
            """
from labkit.kernels.flash_attention import flash_attention

def tiled_attention(query, key, value, block_size, causal):
    return flash_attention(query, key, value, causal=causal, block_sizes=(16, block_size), backend="tiled")
""",
            "write it yourself: your function called labkit's own",
        ),
    ],
    "block_backward": [
        (
            _backward(
                ("(query @ key.T * softmax_scale - lse[:, None]).exp()", "(query @ key.T * softmax_scale).softmax(-1)")
            ),
            "the softmax was taken over this block alone",
        ),
        (
            _backward(
                ("(query @ key.T * softmax_scale - lse[:, None]).exp()", "(query @ key.T * softmax_scale).softmax(-1)"),
                ("(output * grad_output)", "(weights * (grad_output @ value.T))"),
            ),
            "the weights do not sum to 1 over one block",
        ),
        (_backward((" - delta)", ")")), "delta is missing"),
        (
            _backward(("(output * grad_output)", "(weights * (grad_output @ value.T))")),
            "delta is summed over this block",
        ),
        (_backward(("@ key * softmax_scale", "@ key"), ("@ query * softmax_scale", "@ query")), "holds softmax_scale"),
        (_backward(("@ key * softmax_scale", "@ key")), "grad_query should be what autograd gives"),
        (_backward(("@ query * softmax_scale", "@ query")), "grad_key should be what autograd gives"),
        (_backward(("key.T * softmax_scale", "key.T")), "the scores, too, are scaled before lse is subtracted"),
        (
            _backward(("key.T * softmax_scale", "key.T / query.shape[-1] ** 0.5")),
            "for block 1 of 2 (2 keys of 7)",
        ),
        (
            _backward(("@ key * softmax_scale", "@ key / query.shape[-1] ** 0.5")),
            "for block 1 of 2 (2 keys of 7), grad_query",
        ),
        (
            _backward(
                ("weights * (grad_output @ value.T - delta)", "(grad_output @ value.T) * softmax_scale / softmax_scale")
            ),
            ("the gradient of the weights is not yet that of the scores"),
        ),
        (_backward((" - delta)", " + delta)")), "should be what autograd gives"),
        (
            _backward(
                ("(output * grad_output).sum(-1, keepdim=True)", "(output * grad_output).mean(-1, keepdim=True)")
            ),
            ("should be what autograd gives"),
        ),
        (_backward(("(output * grad_output).sum(-1, keepdim=True)", "output.sum(-1, keepdim=True)")), "should be what"),
        (_backward(("weights.T @ grad_output", "grad_scores.T @ grad_output")), "grad_value should be what autograd"),
        (_backward(("weights.T @ grad_output", "weights.T @ output")), "grad_value should be what autograd gives"),
        (
            _backward(
                (
                    "(query @ key.T * softmax_scale - lse[:, None]).exp()",
                    ("(query @ key.T * softmax_scale).exp() / lse[:, None].exp()"),
                )
            ),
            "or it overflows, should be finite",
        ),
        (
            _backward(
                (
                    "(query @ key.T * softmax_scale - lse[:, None]).exp()",
                    ("2 ** (query @ key.T * softmax_scale - lse[:, None])"),
                )
            ),
            "should be what autograd gives",
        ),
        (
            _backward(("lse[:, None]).exp()", "lse[:, None]).exp() / lse.exp()[:, None]")),
            "should be what autograd gives",
        ),
        (_backward(("grad_scores.T @ query", "grad_scores @ query")), "your function raised RuntimeError"),
        (_backward(("return grad_query, grad_key,", "return -grad_query, -grad_key, -")), "minus the gradient"),
        (_backward(("return grad_query, grad_key, weights", "return grad_key, grad_query, weights")), "the shape"),
        (_backward(("    delta =", "    output *= grad_output\n    delta =")), "should stay as it is"),
        (
            _backward(("return grad_query, grad_key, weights.T @ grad_output", "return grad_query")),
            "return three things",
        ),
    ],
    "fixed_flash_attention": [
        (_BUGGY_FLASH, "33 tokens in blocks of 16: the split into blocks should not change the output"),
        (_fixed(("repeat_interleave(groups, dim=1)", "repeat(1, groups, 1, 1)")), "6 query heads on 2 KV heads"),
        (
            _fixed(("key.repeat_interleave(groups, dim=1)", "key.repeat(1, groups, 1, 1)")),
            "neighbouring query heads should share a KV head",
        ),
        (_fixed(("[:, None] + kv_len - q_len", "[:, None]")), "1 query after a past, 20 keys in all"),
        (_fixed(("[:, None] + kv_len - q_len", "[:, None] + (kv_len - 1) * (q_len == 1)")), "5 queries after a past"),
        (_fixed(("output * rescale", "output")), "the split into blocks should not change the output"),
        (_fixed(("total * rescale", "total")), "the split into blocks should not change the output"),
        (
            _fixed(("output * rescale", "output"), ("total * rescale", "total")),
            "the split into blocks should not change",
        ),
        (_fixed(_BASE), "a row may see nothing of a whole block"),
        (
            _fixed(
                _BASE,
                ("    return output / total.masked_fill(total == 0, 1)", ("    return (output / total).nan_to_num()")),
            ),
            "padding should have no weight, and the rest be as without it",
        ),
        (_fixed(("total.masked_fill(total == 0, 1)", "total")), "a row may see nothing of a whole block"),
        (_fixed(('float("-inf"), 0)', 'float("-inf"), 0).clamp(min=0)')), "Are all sums of a row"),
        (_fixed(('3], 1), float("-inf"))', "3], 1), 0.0)")), "with scores in the hundreds, above and below zero"),
        (_fixed(('float("-inf"))\n', "-1e9)\n")), "should give zeros"),
        (_fixed(("columns > rows", "columns >= rows")), "12 tokens in one block"),
        (
            _fixed(('        scores = scores.masked_fill(columns > rows, float("-inf"))\n', "")),
            "12 tokens in one block",
        ),
        (_fixed((" / query.shape[-1] ** 0.5", "")), "12 tokens in one block: the output is not causal attention's"),
        (_fixed(("padding_mask is not None", "False")), "padding on the left, longer than a block"),
        (_fixed(("~padding_mask", "padding_mask")), "padding"),
        (
            _fixed(
                (
                    "range(0, kv_len, block_size)",
                    "range(max(0, kv_len - 256) // block_size * block_size, kv_len, block_size)",
                )
            ),
            "301 tokens in blocks of 16: the output is not causal attention's",
        ),
        (_FIXED_SDPA, "your function called scaled_dot_product_attention"),
        (_FIXED_STANDARD, "of the matrix of scores at once"),
        (
            _fixed(
                (
                    "return output /",
                    "if padding_mask is not None and (total == 0).any():\n        return output\n    return output /",
                )
            ),
            "padding should have no weight",
        ),
    ],
}

_SOFTMAX_NORMALIZED = """
import torch

def online_softmax(state, scores, values):
    maximum, total, weighted = (t.double() for t in state)
    lse = maximum + total.log()
    block = scores.double().logsumexp(-1, keepdim=True)
    both = torch.logaddexp(lse, block)
    new = torch.maximum(maximum, scores.double().amax(-1, keepdim=True))
    safe = torch.where(new.isinf(), torch.zeros_like(new), new)
    kept = torch.where(maximum.isinf(), torch.zeros_like(new), (maximum - safe).exp())
    return [new, (both - safe).exp(), kept * weighted + (scores.double() - safe).exp() @ values.double()]
"""
_SOFTMAX_BY_KEY = """
import math

def online_softmax(state, scores, values):
    maximum, total, weighted = (t.clone() for t in state)
    for row in range(scores.shape[0]):
        for column in range(scores.shape[1]):
            score = float(scores[row, column])
            if score == -math.inf:
                continue
            old = float(maximum[row])
            if score > old:
                total[row] *= math.exp(old - score)
                weighted[row] *= math.exp(old - score)
                maximum[row] = score
            weight = math.exp(score - float(maximum[row]))
            total[row] += weight
            weighted[row] += weight * values[column]
    return maximum, total, weighted
"""
_SOFTMAX_IN_PLACE = """
import torch

def online_softmax(state, scores, values):
    maximum, total, weighted = state
    old = maximum.clone()
    torch.maximum(maximum, scores.amax(-1, keepdim=True), out=maximum)
    rescale = (old - maximum).exp().nan_to_num(0)
    weights = (scores - maximum).exp().nan_to_num(0)
    total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
    weighted.mul_(rescale).add_(weights @ values)
    return state
"""
_TILES_BACKWARDS = """
import torch

def tiled_attention(query, key, value, block_size, causal):
    lowest = torch.finfo(torch.float64).min
    q_len, kv_len = query.shape[2], key.shape[2]
    query, key, value = query.double(), key.double(), value.double()
    out = torch.zeros_like(query)
    for q_start in range(0, q_len, 32):
        q = query[:, :, q_start : q_start + 32] * query.shape[-1] ** -0.5
        places = torch.arange(q_start, q_start + q.shape[2]) + kv_len - q_len
        most = torch.full(q.shape[:3], lowest, dtype=torch.float64)
        total, acc = torch.zeros_like(most), torch.zeros_like(q)
        starts = [s for s in range(0, kv_len, block_size) if not causal or s <= places[-1]]
        for start in reversed(starts):
            k, v = key[:, :, start : start + block_size], value[:, :, start : start + block_size]
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
            if causal:
                seen = torch.arange(start, start + k.shape[2])[None] <= places[:, None]
            new = torch.maximum(most, scores.masked_fill(~seen, lowest).amax(-1))
            p = torch.where(seen, (scores - new[..., None]).exp(), 0.0)
            r = (most - new).exp()
            total, acc, most = total * r + p.sum(-1), acc * r[..., None] + p @ v, new
        out[:, :, q_start : q_start + 32] = torch.where(total[..., None] > 0, acc / total[..., None], 0.0)
    return out
"""
_TILES_TWO_PASSES = """
import torch

def tiled_attention(query, key, value, block_size, causal):
    q_len, kv_len = query.shape[-2], key.shape[-2]

    def blocks():
        for k, v, at in zip(*(t.split(block_size, -2) for t in (key, value, torch.arange(kv_len)[:, None]))):
            scores = query @ k.transpose(-1, -2) / query.shape[-1] ** 0.5
            later = at.T - torch.arange(q_len)[:, None] > kv_len - q_len
            yield (scores.masked_fill(later, -torch.inf) if causal else scores), v

    lse = torch.full(query.shape[:-1], -torch.inf)
    for scores, _ in blocks():
        lse = torch.logaddexp(lse, scores.logsumexp(-1))
    lse = lse.clamp(min=-1e30).unsqueeze(-1)
    return sum((scores - lse).exp() @ v for scores, v in blocks())
"""
_TILES_OF_SOFTMAX = """
import torch

def tiled_attention(query, key, value, block_size, causal):
    q_len, kv_len = query.shape[2], key.shape[2]
    out, lse = torch.zeros_like(query), torch.full((*query.shape[:3], 1), -torch.inf)
    for start in range(0, kv_len, block_size):
        stop = start + block_size
        scores = query @ key[:, :, start:stop].mT * query.shape[-1] ** -0.5
        if causal:
            i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)[start:stop]
            scores[..., j > i + kv_len - q_len] = -torch.inf
        part = scores.softmax(-1).nan_to_num(0) @ value[:, :, start:stop]
        here = scores.logsumexp(-1, keepdim=True)
        both = torch.logaddexp(lse, here)
        out = out * (lse - both).exp().nan_to_num(0) + part * (here - both).exp().nan_to_num(0)
        lse = both
    return out
"""
_BACKWARD_EINSUM = """
import torch

def block_backward(query, key, value, output, grad_output, lse, softmax_scale):
    scaled = softmax_scale * query
    scores = torch.einsum("qd,kd->kq", scaled, key)
    p = torch.exp2((scores - lse) * 1.4426950408889634)
    dp = torch.einsum("kd,qd->kq", value, grad_output)
    ds = p * dp - p * torch.einsum("qd,qd->q", output, grad_output)
    return [ds.T @ key * softmax_scale, ds @ scaled, p @ grad_output]
"""
_BACKWARD_BY_AUTOGRAD = """
import torch

def block_backward(query, key, value, output, grad_output, lse, softmax_scale):
    q, k, v = (t.detach().clone().requires_grad_() for t in (query, key, value))
    with torch.enable_grad():
        p = torch.exp(q @ k.T * softmax_scale - lse[:, None])
        loss = (p @ v * grad_output).sum() - (p.sum(-1) * (output * grad_output).sum(-1)).sum()
        return torch.autograd.grad(loss, (q, k, v))
"""
_FIXED_GROUPED = """
import torch

def fixed_flash_attention(query, key, value, padding_mask=None, block_size=16):
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, q_len, head_dim) / head_dim**0.5
    most = torch.full(grouped.shape[:-1], -1e30)
    total, acc = torch.zeros_like(most), torch.zeros_like(grouped)
    for start in reversed(range(0, kv_len, block_size)):
        keys, values = (t[:, :, None, start : start + block_size] for t in (key, value))
        hidden = torch.arange(start, start + keys.shape[3]) - torch.arange(q_len)[:, None] > kv_len - q_len
        hidden = hidden.expand(batch, 1, 1, *hidden.shape)
        if padding_mask is not None:
            hidden = hidden | ~padding_mask[:, None, None, None, start : start + block_size]
        scores = (grouped @ keys.mT).masked_fill(hidden, -torch.inf)
        new = torch.maximum(most, scores.amax(-1))
        weights = (scores - new[..., None]).exp()
        factor = (most - new).exp()
        total, acc, most = total * factor + weights.sum(-1), acc * factor[..., None] + weights @ values, new
    return (acc / total.clamp(min=1e-30)[..., None]).flatten(1, 2)
"""

_TRAFFIC_BY_WALK = """
def attention_traffic(q_len, kv_len, head_dim, block_q, bytes_per_element):
    q, kv, matrix = q_len * head_dim, kv_len * head_dim, q_len * kv_len
    scores = q + kv + matrix
    softmax = matrix + matrix
    output = matrix + kv + q
    moved = 0
    for start in range(0, q_len, block_q):
        rows = min(block_q, q_len - start)
        moved += rows * head_dim + kv + kv + rows * head_dim
    return [(scores + softmax + output) * bytes_per_element, moved * bytes_per_element + q_len * 4.0]
"""

ALSO_RIGHT: dict[str, list[str]] = {
    "attention_traffic": [_TRAFFIC_BY_WALK],
    "online_softmax": [
        _SOFTMAX_NORMALIZED,
        _SOFTMAX_BY_KEY,
        _SOFTMAX_IN_PLACE,
        _softmax(("keepdim=True))\n", "keepdim=True)).clamp(min=-1e30)\n"), _BASE),
    ],
    "tiled_attention": [_TILES_BACKWARDS, _TILES_TWO_PASSES, _TILES_OF_SOFTMAX],
    "block_backward": [_BACKWARD_EINSUM, _BACKWARD_BY_AUTOGRAD],
    "fixed_flash_attention": [
        _FIXED_GROUPED,
        _fixed(('float("-inf"))\n    total', "-1e30)\n    total"), _BASE),
        _fixed(
            _BASE,
            ("(scores - base).exp()", "(scores - base).exp().nan_to_num(0)"),
            ("(maximum - base).exp()", "(maximum - base).exp().nan_to_num(0)"),
            ("return output / total.masked_fill(total == 0, 1)", "return (output / total).nan_to_num(0)"),
        ),
    ],
}
