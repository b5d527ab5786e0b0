"""Chapter 02's solutions, and wrong answers that learners give, as the text of the cells tagged `exercise:<name>`.

SOLUTIONS[name] replaces the tagged cell when the chapter is run with its solutions; STUBS[name] is an untouched one.
WRONG[name] holds pairs: a cell's text, and a phrase that the check's message must contain, naming what failed.
ALSO_RIGHT[name] holds cells that are right in another way, and must pass.
ANSWERS[name] is what is passed to `check`, as in the notebook's next cell.
"""

ANSWERS: dict[str, str] = {
    "pack_row": "pack_row",
    "gptq_update": "gptq_update",
    "awq_scale": "awq_scale",
    "fixed_calibration": "fixed_calibration",
}

STUBS: dict[str, str] = {
    "pack_row": """
def pack_row(weight_row, bits, group_size):
    ...  # return (words, scales, zeros)
""",
    "gptq_update": """
def gptq_update(weight, hessian_inverse_upper, column, quantized_column):
    ...  # return the weight
""",
    "awq_scale": """
def awq_scale(weight, inputs, quantize, n_grid=20):
    ...  # return the scale, (in_features,)
""",
    "fixed_calibration": """
fixed_calibration = None  # your function, with the same arguments
""",
}

SOLUTIONS: dict[str, str] = {
    "pack_row": """
import torch

def pack_row(weight_row, bits, group_size):
    groups = weight_row.reshape(-1, group_size)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = (high - low) / (2**bits - 1)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    zeros = (-low / scales).round()
    codes = (groups / scales[:, None]).round() + zeros[:, None]
    codes = codes.clamp(0, 2**bits - 1)
    codes = codes.to(torch.int64).reshape(-1, 32 // bits)
    words = (codes << torch.arange(0, 32, bits)).sum(1)
    return words.to(torch.int32), scales, zeros
""",
    "gptq_update": """
import torch

def gptq_update(weight, hessian_inverse_upper, column, quantized_column):
    row = hessian_inverse_upper[column, column + 1 :]
    error = (weight[:, column] - quantized_column) / hessian_inverse_upper[column, column]
    weight = weight.clone()
    weight[:, column + 1 :] -= torch.outer(error, row)
    weight[:, column] = quantized_column
    return weight
""",
    "awq_scale": """
def awq_scale(weight, inputs, quantize, n_grid=20):
    mean = inputs.abs().mean(0).clamp(min=1e-4)
    wanted, best, best_loss = inputs @ weight.T, None, float("inf")
    for i in range(n_grid):
        scale = mean ** (i / n_grid)
        scale = scale / (scale.max() * scale.min()).sqrt()
        found = (inputs / scale) @ quantize(weight * scale).T
        loss = (found - wanted).square().sum().item()
        if loss < best_loss:
            best, best_loss = scale, loss
    return best
""",
    "fixed_calibration": """
import torch

def fixed_calibration(tokenizer, texts, n_samples, seq_len):
    ids = [token for text in texts for token in tokenizer(text).input_ids]
    needed = n_samples * seq_len
    if len(ids) < needed:
        raise ValueError(f"{n_samples} windows of {seq_len} take {needed} tokens; the texts have {len(ids)}")
    return torch.tensor(ids[:needed]).reshape(n_samples, seq_len)
""",
}


def _changed(name: str, *changes: tuple[str, str]) -> str:
    """The solution with its right lines made wrong."""
    text = SOLUTIONS[name]
    for right, wrong in changes:
        assert right in text, right
        text = text.replace(right, wrong)
    return text


_WHOLE_ROW = (
    "low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)",
    "low, high = weight_row.amin().clamp(max=0), weight_row.amax().clamp(min=0)",
)
_FAKE_QUANTIZED = """
import torch

def pack_row(weight_row, bits, group_size):
    groups = weight_row.reshape(-1, group_size)
    scales = (groups.amax(1) - groups.amin(1)) / (2**bits - 1)
    zeros = (-groups.amin(1) / scales).round()
    return ((groups / scales[:, None]).round() * scales[:, None]).flatten(), scales, zeros
"""

_BUGGY_CALIBRATION = """
import torch

def fixed_calibration(tokenizer, texts, n_samples, seq_len):
    samples = []
    for text in texts[:n_samples]:
        ids = tokenizer(text).input_ids
        if len(ids) < seq_len:
            continue
        samples.append(ids[:seq_len])
    return torch.tensor(samples)
"""


def _buggy(*changes: tuple[str, str]) -> str:
    """The buggy loop, mended in a way that is wrong too."""
    text = _BUGGY_CALIBRATION
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


_SKIPS_ANY_LENGTH = (
    ("texts[:n_samples]", "texts"),
    (
        "samples.append(ids[:seq_len])",
        "samples += [ids[i : i + seq_len] for i in range(0, len(ids) - seq_len + 1, seq_len)]",
    ),
)

_KEEPS_NO_REST = """
import torch

def fixed_calibration(tokenizer, texts, n_samples, seq_len):
    samples, buffer = [], []
    for text in texts:
        buffer += tokenizer(text).input_ids
        if len(buffer) >= seq_len:
            samples.append(buffer[:seq_len])
            buffer = []
        if len(samples) == n_samples:
            return torch.tensor(samples)
    raise ValueError("too little text")
"""

WRONG: dict[str, list[tuple[str, str]]] = {
    "pack_row": [
        (_changed("pack_row", ("torch.arange(0, 32, bits)", "torch.arange(32 - bits, -1, -bits)")), "highest bits"),
        (
            _changed("pack_row", ("reshape(-1, 32 // bits)", "reshape(32 // bits, -1).T")),
            "weights that lie far apart",
        ),
        (_changed("pack_row", ("codes = codes.clamp(0, 2**bits - 1)\n", "\n")), "clamp the codes to 0 to 15"),
        (_changed("pack_row", ("2**bits - 1)\n    scales", "2**bits)\n    scales")), "divide by 2^bits - 1"),
        (
            _changed("pack_row", _WHOLE_ROW, ("[:, None]", "")),
            "scales should hold one value for each group: 8 for 128 weights in groups of 16; got 1",
        ),
        (
            _changed("pack_row", (_WHOLE_ROW[0], _WHOLE_ROW[1] + "\n    low, high = low + 0 * groups[:, 0], high")),
            "All scales are equal: is the range taken over the whole row?",
        ),
        (_changed("pack_row", ("words.to(torch.int32)", "words")), "8 bytes; your 2 words of torch.int64 take 16"),
        (
            _changed("pack_row", ("words.to(torch.int32)", "words.float().to(torch.float32)")),
            "words should be torch.int32",
        ),
        (_changed("pack_row", ("words.to(torch.int32)", "codes.flatten().to(torch.int32)")), "8 codes go into one"),
        (_changed("pack_row", ("words.to(torch.int32)", "codes.flatten().to(torch.uint8)")), "torch.uint8 take 16"),
        (_FAKE_QUANTIZED, "torch.float32 take 64"),
        (_changed("pack_row", ("words.to(torch.int32)", "(words & 0x7FFFFFFF).to(torch.int32)")), "is lost"),
        (_changed("pack_row", (".clamp(max=0)", ""), (".clamp(min=0)", "")), "widen the range to hold 0"),
        (
            _changed("pack_row", ("    scales = torch.where(scales > 0, scales, torch.ones_like(scales))\n", "")),
            "scale of 0",
        ),
        (_changed("pack_row", ("(-low / scales).round()", "-low / scales")), "zero should be a whole number"),
        (_changed("pack_row", ("/ scales[:, None]).round()", "/ scales[:, None]).floor()")), "within half a step"),
        (_changed("pack_row", ("32 // bits", "8"), ("(0, 32, bits)", "(0, 32, 4)")), "16 weights of 8 bits take 16"),
        (_changed("pack_row", ("words.to(torch.int32), scales, zeros", "words.to(torch.int32)")), "three tensors"),
    ],
    "gptq_update": [
        (_changed("gptq_update", (" / hessian_inverse_upper[column, column]", "")), "not divided by the diagonal"),
        (_changed("gptq_update", (":] -= torch", ":] += torch")), "moved the wrong way"),
        (
            _changed(
                "gptq_update",
                ("[column, column + 1 :]", "[:, column]"),
                ("weight[:, column + 1 :] -=", "weight -="),
            ),
            "columns [0, 1, 2, 3, 4] changed",
        ),
        (
            _changed(
                "gptq_update",
                (
                    "    row = hessian_inverse_upper[column",
                    "    inverse = hessian_inverse_upper.T @ hessian_inverse_upper\n    row = inverse[column",
                ),
                ("[column, column + 1 :]", "[column]"),
                ("weight[:, column + 1 :] -=", "weight -="),
            ),
            "the columns before j are stored already",
        ),
        (
            _changed("gptq_update", ("[column, column + 1 :]", "[column + 1 :, column]")),
            "under the diagonal U holds zeros",
        ),
        (
            _changed("gptq_update", ("    weight[:, column] = quantized_column\n", "")),
            "column j should be the quantized",
        ),
        (
            _changed("gptq_update", ("    weight[:, column + 1 :] -= torch.outer(error, row)\n", "")),
            "no column after j",
        ),
        (
            _changed(
                "gptq_update",
                ("hessian_inverse_upper[column, column]\n", "hessian_inverse_upper[column, column] ** 2\n"),
            ),
            "U[j, j] twice",
        ),
        (
            _changed("gptq_update", ("    weight = weight.clone()\n", ""), ("    return weight\n", "")),
            "return the weight",
        ),
        (_changed("gptq_update", ("return weight", "return weight[:, column]")), "shape (6, 16); got (6,)"),
    ],
    "awq_scale": [
        (_changed("awq_scale", ("(inputs / scale)", "inputs")), "are the inputs divided by the scale"),
        (_changed("awq_scale", ("inf", "-inf"), ("loss < best_loss", "loss > best_loss")), "and not the largest"),
        (_changed("awq_scale", ("inputs.abs()", "weight.abs()")), "and not that of the weights"),
        (_changed("awq_scale", ("range(n_grid)", "range(1, n_grid)")), "ratio 0 leaves the weight as it is"),
        (_changed("awq_scale", (".clamp(min=1e-4)", "")), "a channel whose inputs are all zero"),
        (
            _changed("awq_scale", (".clamp(min=1e-4)", ""), ("loss < best_loss", "not loss >= best_loss")),
            "should be finite",
        ),
        (_changed("awq_scale", ("quantize(weight * scale)", "(quantize(weight) * scale)")), "same for every channel"),
        (_changed("awq_scale", ("quantize(weight * scale)", "(weight * scale)")), "never called quantize"),
        (_changed("awq_scale", ("        scale = scale / (scale.max() * scale.min()).sqrt()\n", "")), "normalize"),
        (_changed("awq_scale", ("range(n_grid)", "range(20)"), ("i / n_grid", "i / 20")), "with n_grid = 1"),
        (_changed("awq_scale", ("range(n_grid)", "(0, n_grid - 1)")), "each ratio i / n_grid"),
        (_changed("awq_scale", ("return best", "return best_loss")), "the scale should be a torch tensor; got float"),
        (_changed("awq_scale", ("return best", "return -best")), "every scale should be positive"),
        (
            _changed("awq_scale", ("weight * scale", "weight.T * scale[:, None]")),
            "quantize takes a weight of the shape",
        ),
    ],
    "fixed_calibration": [
        (_BUGGY_CALIBRATION, "when some texts are short: asked for 4 windows, your function returned 1: fewer"),
        (
            _buggy(("texts[:n_samples]", "texts")),
            "when some texts are short: asked for 4 windows, your function returned 2",
        ),
        (_buggy(*_SKIPS_ANY_LENGTH, ("(samples)", "(samples[:n_samples])")), "your function returned 3: fewer"),
        (
            _buggy(("            continue\n", "            ids = ids + [0] * (seq_len - len(ids))\n")),
            "padding and separators are not text",
        ),
        (
            _buggy(("(samples)", "((samples * n_samples)[:n_samples])")),
            "no two windows should share text",
        ),
        (
            _changed(
                "fixed_calibration",
                ("raise ValueError(f", "print(f"),
                (".reshape(n_samples, seq_len)", "[: len(ids) // seq_len * seq_len].reshape(-1, seq_len)"),
            ),
            "your function returned 3 windows",
        ),
        (
            _changed("fixed_calibration", ("raise ValueError(f", "raise RuntimeError(f")),
            "raise a ValueError that says so",
        ),
        (
            _changed("fixed_calibration", ("len(ids) < needed", "len(ids) <= needed")),
            "when the texts hold exactly enough",
        ),
        (_changed("fixed_calibration", (".input_ids]", ".input_ids[1:]]")), "leave out words inside a text"),
        (_KEEPS_NO_REST, "when some texts are short, 77 tokens for 4 windows of 16: your function raised ValueError"),
        (
            """
from labkit.corpora import token_batches

def fixed_calibration(tokenizer, texts, n_samples, seq_len):
    return token_batches(tokenizer, " ".join(texts), n_samples, seq_len)
""",
            "write it yourself: your function called labkit's own token_batches",
        ),
    ],
}

_WORD_BY_WORD = """
import torch

def pack_row(weight_row, bits, group_size):
    words, scales, zeros, filled, shift = [], [], [], 0, 0
    for group in weight_row.split(group_size):
        low, high = min(float(group.min()), 0.0), max(float(group.max()), 0.0)
        scale = max((high - low) / (2**bits - 1), 1e-8)
        zero = round(-low / scale)
        scales.append(scale)
        zeros.append(zero)
        for w in group.tolist():
            filled |= min(max(round(w / scale) + zero, 0), 2**bits - 1) << shift
            shift += bits
            if shift == 32:
                words.append(filled - 2**32 if filled >= 2**31 else filled)
                filled, shift = 0, 0
    return torch.tensor(words, dtype=torch.int32), torch.tensor(scales), torch.tensor(zeros)
"""
_IN_PLACE = """
def gptq_update(weight, hessian_inverse_upper, column, quantized_column):
    error = (weight[:, column] - quantized_column) / hessian_inverse_upper[column, column]
    weight[:, column:] -= error[:, None] * hessian_inverse_upper[column, column:]
    return weight
"""
_MEAN_LOSS = """
import torch

def awq_scale(weight, inputs, quantize, n_grid=20):
    mean = inputs.abs().mean(0)
    mean = torch.where(mean > 0, mean, mean[mean > 0].mean())
    scales = [mean ** (i / n_grid) for i in range(n_grid)]
    scales = [s / (s.max() * s.min()).sqrt() for s in scales]
    losses = [((quantize(weight * s) / s - weight) @ inputs.T).pow(2).mean() for s in scales]
    return scales[int(torch.stack(losses).argmin())]
"""
_JOINED_TEXT = """
import torch

def fixed_calibration(tokenizer, texts, n_samples, seq_len):
    ids = tokenizer("\\n\\n".join(texts), return_tensors="pt", add_special_tokens=False).input_ids[0]
    windows = ids[: len(ids) // seq_len * seq_len].split(seq_len)
    if len(windows) < n_samples:
        raise ValueError("too little text")
    return [windows[i] for i in torch.randperm(len(windows))[:n_samples].tolist()]
"""
_BUFFERED = """
def fixed_calibration(tokenizer, texts, n_samples, seq_len):
    samples, buffer = [], []
    for text in texts:
        buffer = buffer + tokenizer.encode(text)
        while len(buffer) >= seq_len and len(samples) < n_samples:
            samples.append(buffer[:seq_len])
            buffer = buffer[seq_len:]
    if len(samples) < n_samples:
        raise ValueError("too little text")
    return samples
"""

ALSO_RIGHT: dict[str, list[str]] = {
    "pack_row": [
        _WORD_BY_WORD,
        _changed("pack_row", (", scales, zeros\n", ", scales.half(), zeros.to(torch.uint8)[:, None]\n")),
    ],
    "gptq_update": [_IN_PLACE, _changed("gptq_update", ("return weight", "return weight.float()"))],
    "awq_scale": [_MEAN_LOSS, _changed("awq_scale", ("1e-4", "1e-8"))],
    "fixed_calibration": [_JOINED_TEXT, _BUFFERED],
}
