"""Chapter 03's solutions, and wrong answers that learners give, as the text of the cells tagged `exercise:<name>`.

SOLUTIONS[name] replaces the tagged cell when the chapter is run with its solutions; STUBS[name] is an untouched one.
WRONG[name] holds pairs: a cell's text, and a phrase that the check's message must contain, naming what failed.
ALSO_RIGHT[name] holds cells that are right in another way, and must pass.
ANSWERS[name] is what is passed to `check`, as in the notebook's next cell.
"""

ANSWERS: dict[str, str] = {
    "cache_size": "cache_size",
    "merge_heads": "merge_heads",
    "block_allocator": "BlockAllocator",
    "fixed_attention": "fixed_attention",
}

STUBS: dict[str, str] = {
    "cache_size": """
def cache_size(config, batch, seq_len, bits, group_size=None):
    ...  # return the bytes
""",
    "merge_heads": """
def merge_heads(weight, bias, num_key_value_heads, new_heads):
    ...  # return (weight, bias)
""",
    "block_allocator": """
class BlockAllocator:
    def __init__(self, num_blocks, block_size): ...
    def allocate(self, seq_id, num_tokens): ...  # return the block table
    def append(self, seq_id): ...  # room for one more token; return the block table
    def fork(self, seq_id, new_id): ...  # return the new sequence's block table
    def free(self, seq_id): ...
""",
    "fixed_attention": """
fixed_attention = None  # your function, with the same arguments
""",
}

SOLUTIONS: dict[str, str] = {
    "cache_size": """
def cache_size(config, batch, seq_len, bits, group_size=None):
    heads, width = config.num_key_value_heads, config.head_dim
    values = 2 * config.num_hidden_layers * heads * width * batch * seq_len
    size = values * bits / 8
    if group_size is not None:
        size += values / group_size * (2 + 2)
    return size
""",
    "merge_heads": """
def merge_heads(weight, bias, num_key_value_heads, new_heads):
    if num_key_value_heads % new_heads:
        raise ValueError(f"{num_key_value_heads} heads do not divide into {new_heads}")
    group = num_key_value_heads // new_heads
    merged = weight.reshape(new_heads, group, -1, weight.shape[1])
    merged = merged.mean(1).flatten(0, 1)
    if bias is not None:
        bias = bias.reshape(new_heads, group, -1).mean(1).flatten()
    return merged, bias
""",
    "block_allocator": """
class BlockAllocator:
    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.unused = list(range(num_blocks))
        self.owners = [0] * num_blocks
        self.tables, self.lengths = {}, {}

    def _take(self, count):
        if count > len(self.unused):
            raise MemoryError(f"{count} blocks needed, {len(self.unused)} free")
        taken = [self.unused.pop() for _ in range(count)]
        for block in taken:
            self.owners[block] = 1
        return taken

    def _drop(self, block):
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.unused.append(block)

    def allocate(self, seq_id, num_tokens):
        self.tables[seq_id] = self._take(-(-num_tokens // self.block_size))
        self.lengths[seq_id] = num_tokens
        return self.tables[seq_id]

    def append(self, seq_id):
        table = self.tables[seq_id]
        if self.lengths[seq_id] % self.block_size == 0:
            table += self._take(1)
        elif self.owners[table[-1]] > 1:
            (copy,) = self._take(1)
            self._drop(table[-1])
            table[-1] = copy
        self.lengths[seq_id] += 1
        return table

    def fork(self, seq_id, new_id):
        self.tables[new_id] = list(self.tables[seq_id])
        self.lengths[new_id] = self.lengths[seq_id]
        for block in self.tables[new_id]:
            self.owners[block] += 1
        return self.tables[new_id]

    def free(self, seq_id):
        for block in self.tables.pop(seq_id):
            self._drop(block)
        del self.lengths[seq_id]
""",
    "fixed_attention": """
import torch

def fixed_attention(query, key, value, past=None):
    if past is not None:
        key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    q_len, kv_len = scores.shape[-2:]
    future = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)
    scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ values, (key, value)
""",
}


def _changed(name: str, *changes: tuple[str, str]) -> str:
    """The solution with its right lines made wrong."""
    text = SOLUTIONS[name]
    for right, wrong in changes:
        assert right in text, right
        text = text.replace(right, wrong)
    return text


_BUGGY_ATTENTION = """
import torch

def fixed_attention(query, key, value, past=None):
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    if past is None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ values, (key, value)
"""
_REPEAT = ("repeat_interleave(groups, dim=1)", "repeat(1, groups, 1, 1)")
_MASK = '    scores = scores.masked_fill(future, float("-inf"))\n'
_FUTURE = "    future = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)\n"
_JOIN = "        key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)\n"
_HIDDEN_CACHE = """
import torch

def fixed_attention(query, key, value, past=None):
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    output = scores.masked_fill(future, float("-inf")).softmax(-1) @ values
    if past is not None:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    return output, (key, value)
"""
_TOP_LEFT = """
import torch
import torch.nn.functional as F

def fixed_attention(query, key, value, past=None):
    if past is not None:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    causal = query.shape[2] > 1
    output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    return output, (key, value)
"""
_IN_PLACE = """
import torch

def fixed_attention(query, key, value, past=None):
    past = [key[:, :, :0], value[:, :, :0]] if past is None else past
    past[0], past[1] = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    key, value = past
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(key.shape[2] - query.shape[2] + 1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value.repeat_interleave(groups, 1), past
"""

_HEADS = ("heads, width = config.num_key_value_heads,", "heads, width = config.num_attention_heads,")
_WIDTH = ("config.head_dim", "config.hidden_size // config.num_attention_heads")
_SIZE = "values * bits / 8"
_PAIRS = "values / group_size * (2 + 2)"

_MERGED = (
    "    merged = weight.reshape(new_heads, group, -1, weight.shape[1])\n    merged = merged.mean(1).flatten(0, 1)\n"
)

_FIRST_IF_ONE = """    if new_heads == 1:
        merged = weight[: weight.shape[0] // num_key_value_heads]
"""


def _merged(line: str) -> str:
    """The solution with another way to the merged weight."""
    return _changed("merge_heads", (_MERGED, f"    merged = {line}\n"))


_TAKEN = "        taken = [self.unused.pop() for _ in range(count)]\n"
_TAKEN_TOO_SOON = """
        taken = []
        for _ in range(count):
            if not self.unused:
                raise MemoryError("none left")
            taken.append(self.unused.pop())
"""
_TAKEN_TWICE = """
        taken = (self.unused + list(range(len(self.owners))))[:count]
        del self.unused[:count]
"""
_CHECK = "        if count > len(self.unused):\n"
_REFUSE = '            raise MemoryError(f"{count} blocks needed, {len(self.unused)} free")\n'
_COPY = (
    "        elif self.owners[table[-1]] > 1:\n            (copy,) = self._take(1)\n"
    "            self._drop(table[-1])\n            table[-1] = copy\n"
)
_GROWS = "if self.lengths[seq_id] % self.block_size == 0:"


def _block(*changes: tuple[str, str]) -> str:
    return _changed("block_allocator", *changes)


WRONG: dict[str, list[tuple[str, str]]] = {
    "cache_size": [
        (_changed("cache_size", _HEADS), "not for num_attention_heads"),
        (_changed("cache_size", ("values = 2 *", "values =")), "K and V are both kept"),
        (_changed("cache_size", (" config.num_hidden_layers *", "")), "every layer keeps its own"),
        (_changed("cache_size", _WIDTH), "head_dim is a field of its own"),
        (_changed("cache_size", (_SIZE, "values * bits")), "8 of them are a byte"),
        (_changed("cache_size", (_SIZE, "values * (bits // 8)")), "multiply first, and divide then"),
        (_changed("cache_size", (_SIZE, "values * max(1, bits // 8)")), "without groups, 4 bits"),
        (_changed("cache_size", (" * batch", "")), "each row of a batch has its own"),
        (_changed("cache_size", (" * seq_len", "")), "the cache grows with seq_len"),
        (_changed("cache_size", (_SIZE, "values * 2")), "without groups, 8 bits a value take 8/16"),
        (_changed("cache_size", (f"size += {_PAIRS}", "pass")), "nothing was added for the groups"),
        (_changed("cache_size", ("(2 + 2)", "2")), "half of it was added"),
        (_changed("cache_size", ("(2 + 2)", "(4 + 4)")), "twice that was added"),
        (_changed("cache_size", (_PAIRS, "values * 4")), "one pair serves a whole group"),
        (_changed("cache_size", (_PAIRS, "values / 2 / group_size * 4")), "half of it was added"),
        (_changed("cache_size", (_PAIRS, "batch * seq_len / group_size * 4")), "5 bits a value"),
        (_changed("cache_size", (_PAIRS, "values / 32 * 4")), "8 bits in groups of 64 are 8.5 bits a value"),
        (
            """
from labkit.sizing import LlamaShape

def cache_size(config, batch, seq_len, bits, group_size=None):
    shape = LlamaShape.of(config)
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * batch * seq_len * bits / 8
""",
            "write it yourself: your function called labkit's own of",
        ),
    ],
    "merge_heads": [
        (
            _merged("weight.reshape(group, new_heads, -1, weight.shape[1]).mean(0).flatten(0, 1)"),
            "yours took every second head",
        ),
        (
            _changed("merge_heads", ("merged.mean(1).flatten(0, 1)", "merged.sum(1).flatten(0, 1)")),
            "yours added the heads up",
        ),
        (_merged("weight.reshape(new_heads, group, -1, weight.shape[1])[:, 0].flatten(0, 1)"), "kept the first head"),
        (_merged("weight.reshape(-1, group, weight.shape[1]).mean(1)"), "a row is one channel of one head"),
        (
            _merged("weight.reshape(-1, new_heads, group, weight.shape[1]).mean(2).transpose(0, 1).flatten(0, 1)"),
            "two merged heads should hold 1 and 4; yours hold 2.333 and 2.667",
        ),
        (
            _merged("weight.reshape(-1, new_heads, group, weight.shape[1]).mean(2).flatten(0, 1)"),
            "channel i is merged with channel i",
        ),
        (
            _changed("merge_heads", (_MERGED, _MERGED + _FIRST_IF_ONE)),
            "3 heads merged to 1: each new head should compute the mean of what the heads of its group computed: the "
            "first head of each group was kept",
        ),
        (_merged("weight.reshape(new_heads, -1, weight.shape[1]).mean(1)"), "should have the shape (16, 24)"),
        (
            _merged("weight.reshape(weight.shape[0], new_heads, -1).mean(2)"),
            "should have the shape (16, 24); got (48, 2)",
        ),
        (_changed("merge_heads", ("group, -1).mean(1)", "group, -1).sum(1)")), "the bias is merged as the weight is"),
        (
            _changed("merge_heads", ("bias.reshape(new_heads, group, -1).mean(1).flatten()", "bias[::group]")),
            "the bias is merged as the weight is",
        ),
        (_changed("merge_heads", ("return merged, bias", "return merged, None")), "the bias merged from 9 heads"),
        (
            _changed("merge_heads", ("return merged, bias", "return merged, merged[:, 0] if bias is None else bias")),
            "bias is None for a projection without one",
        ),
        (
            _changed("merge_heads", ("    if bias is not None:\n        bias =", "    bias =")),
            "your function raised AttributeError",
        ),
        (_changed("merge_heads", ("return merged, bias", "return merged")), "return two things, (weight, bias)"),
        (_changed("merge_heads", ("return merged, bias", "return merged.float(), bias")), "keep the dtype"),
        (
            _changed("merge_heads", ("return merged, bias", "weight.mul_(1.01)\n    return merged, bias")),
            "should stay as they are",
        ),
        (
            _changed(
                "merge_heads",
                ("raise ValueError(f", "print(f"),
                (
                    "merged = weight.reshape(new_heads, group",
                    (
                        "merged = weight[: new_heads * group * (len(weight) // num_key_value_heads)]"
                        ".reshape(new_heads, group"
                    ),
                ),
            ),
            "raise a ValueError that says so",
        ),
        (
            _changed("merge_heads", ("raise ValueError(f", "raise AssertionError(f")),
            "6 heads cannot be merged evenly to 4",
        ),
    ],
    "block_allocator": [
        (_block(("            self.unused.append(block)\n", "            pass\n")), "are blocks lost when a sequence"),
        (_block(("        if self.owners[block] == 0:\n", "        if True:\n")), "which a sequence still owns"),
        (
            _block(("        for block in self.tables[new_id]:\n            self.owners[block] += 1\n", "")),
            "copy on write",
        ),
        (_block(("list(self.tables[seq_id])", "self.tables[seq_id]")), "are the two tables one list?"),
        (_block((_COPY, "")), "copy on write: the last block is shared"),
        (_block(("            self._drop(table[-1])\n", "")), "is its count lowered when another"),
        (
            _block(("self._take(-(-num_tokens // self.block_size))", "self._take(num_tokens // self.block_size)")),
            "3 tokens take 1 block of 4; yours takes 0",
        ),
        (
            _block(("self._take(-(-num_tokens // self.block_size))", "self._take(num_tokens // self.block_size + 1)")),
            "4 tokens take 1 block of 4; yours takes 2",
        ),
        (
            _block(("self._take(-(-num_tokens // self.block_size))", "self._take(num_tokens)")),
            "4 tokens take 1 block of 4; yours takes 4",
        ),
        (_block((_GROWS, "if True:")), "the last block has room: no new one follows"),
        (
            _block((_GROWS, "if self.lengths[seq_id] % self.block_size == self.block_size - 1:")),
            "[3] into [3]",
        ),
        (_block((_GROWS, "if False:")), "the last block is full, so a new one follows"),
        (
            _block((_GROWS, "if (self.lengths[seq_id] + 1) % self.block_size == 1:")),
            "blocks of 1",
        ),
        (
            _block((_CHECK + _REFUSE, ""), ("self.unused.pop() for", "self.unused.pop(0) for")),
            "append(0) raised IndexError: pop from empty list",
        ),
        (
            _block(
                (_CHECK + _REFUSE, ""),
                (_TAKEN, _TAKEN_TOO_SOON),
            ),
            "allocate(1, 8) raised MemoryError, and takes 2 new of 2 free blocks",
        ),
        (_block((_TAKEN, "        taken = self.unused[-count:]\n")), "one block stands in the table twice"),
        (
            _block(("range(num_blocks))", "range(1, num_blocks + 1))"), ("[0] * num_blocks", "[0] * (num_blocks + 1)")),
            ("the blocks are 0 to 3"),
        ),
        (
            _block(
                (
                    "        table = self.tables[seq_id]\n",
                    (
                        "        table = self.tables[seq_id]\n        length = self.lengths[seq_id]\n"
                        "        self.lengths[seq_id] += 1\n"
                    ),
                ),
                ("        if self.lengths[seq_id] % self.block_size", "        if length % self.block_size"),
                ("            table[-1] = copy\n        self.lengths[seq_id] += 1\n", "            table[-1] = copy\n"),
            ),
            "A call that is refused changes nothing, the length neither",
        ),
        (
            _block((_CHECK, "        if count >= len(self.unused):\n")),
            "append(0) raised MemoryError, and takes 1 new of 1 free blocks",
        ),
        (
            _block((_GROWS, "if self.lengths[seq_id] % self.block_size == 0 and self.owners[table[-1]] == 1:")),
            ("the last block is full, so a new one follows"),
        ),
        (
            _block(("elif self.owners[table[-1]] > 1:", "elif self.owners[table[-1]] > 0:")),
            "so nothing changes: is its count lowered",
        ),
        (_block(("        return table\n", "        return len(table)\n")), "should return the block table"),
        (_block(("        return table\n", "")), "append(0) returned nothing"),
        (_block(("raise MemoryError(f", "raise ValueError(f")), "Too few free blocks are a MemoryError"),
        (_block(("    def fork(self", "    def branch(self")), "should have a method fork"),
        (
            _block(
                (_CHECK + _REFUSE, ""),
                (_TAKEN, _TAKEN_TWICE),
            ),
            "append(0) takes 1 new of 0 free blocks: raise a MemoryError",
        ),
    ],
    "fixed_attention": [
        (_BUGGY_ATTENTION, "head h reads KV head h % 2, and should read h // 3"),
        (_BUGGY_ATTENTION.replace("repeat(1, groups, 1, 1)", "repeat_interleave(groups, 1)"), "is the past joined"),
        (_changed("fixed_attention", _REPEAT), "head h reads KV head h % 2, and should read h // 3"),
        (_changed("fixed_attention", (_JOIN, "        pass\n")), "is the past joined with the new tokens"),
        (
            _changed("fixed_attention", (_FUTURE + _MASK, "")),
            "a token may not see those after it: mask them",
        ),
        (
            _changed("fixed_attention", (_FUTURE + _MASK, ""), _REPEAT),
            "neighbours share, as repeat_interleave gives it and repeat does not; and a token may not see",
        ),
        (
            _changed("fixed_attention", (_MASK, "    if past is None:\n    " + _MASK)),
            "5 tokens after a past of 4, 4 query heads on 4 KV heads: the output should be that of one pass over all "
            "tokens: each of the new tokens sees all of them",
        ),
        (
            _changed(
                "fixed_attention",
                (_FUTURE, _FUTURE.replace("kv_len - q_len + 1", "1")),
                (_MASK, "    if q_len > 1:\n    " + _MASK),
            ),
            "the mask is laid at the start",
        ),
        (_changed("fixed_attention", ("kv_len - q_len + 1", "1")), "1 token after a past of 1"),
        (_TOP_LEFT, "the mask is laid at the start: the first of the new tokens sees the whole past"),
        (_HIDDEN_CACHE, "is past read, and is token 0 in it?"),
        (
            _changed("fixed_attention", (", (key, value)\n", ", (key[:, :, 1:], value[:, :, 1:])\n")),
            "after 9 tokens past should hold keys",
        ),
        (
            _changed(
                "fixed_attention",
                ("    scores = query @", "    keys, values = keys.clone(), values.clone()\n    scores = query @"),
                (_FUTURE, _FUTURE + "    if past is not None:\n        future[:, 0] = True\n"),
            ),
            "is past read, and is token 0 in it?",
        ),
        (_changed("fixed_attention", (", (key, value)\n", ", (keys, values)\n")), "or GQA saves no memory"),
        (_changed("fixed_attention", (" / query.shape[-1] ** 0.5", "")), "divided by sqrt(head_dim)"),
        (
            _changed(
                "fixed_attention",
                ("torch.cat([past[0], key]", "torch.cat([key, past[0]]"),
                ("torch.cat([past[1], value]", "torch.cat([value, past[1]]"),
            ),
            "the output should be that of one pass over all tokens",
        ),
        (_changed("fixed_attention", ("triu(kv_len - q_len + 1)", "triu(kv_len - q_len)")), "should be finite"),
        (_IN_PLACE, "changed the past that it was given"),
        (_changed("fixed_attention", (", (key, value)\n", "\n")), "return two things, (output, past)"),
    ],
}

_BY_LOOP = """
def cache_size(config, batch, seq_len, bits, group_size=None):
    total_bits = 0
    for _ in range(config.num_hidden_layers):
        for _ in ("keys", "values"):
            numbers = batch * config.num_key_value_heads * seq_len * config.head_dim
            total_bits += numbers * bits + (numbers // group_size * 32 if group_size else 0)
    return total_bits // 8
"""
_EXACT_BITS = """
def cache_size(config, batch, seq_len, bits, group_size=None):
    per_value = bits + (32 / group_size if group_size else 0)
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return batch * seq_len * token * per_value / 8
"""
_HEAD_BY_HEAD = """
import torch

def merge_heads(weight, bias, num_key_value_heads, new_heads):
    if num_key_value_heads % new_heads != 0:
        raise ValueError("the heads do not divide evenly")
    width = weight.shape[0] // num_key_value_heads
    group = num_key_value_heads // new_heads

    def merge(tensor):
        heads = tensor.split(width)
        runs = [heads[i : i + group] for i in range(0, num_key_value_heads, group)]
        return torch.cat([torch.stack(run).mean(0) for run in runs])

    return [merge(weight), None if bias is None else merge(bias)]
"""
_BY_MATRIX = """
import torch

def merge_heads(weight, bias, num_key_value_heads, new_heads):
    assert weight.ndim == 2
    group, left = divmod(num_key_value_heads, new_heads)
    if left:
        raise ValueError(num_key_value_heads)
    pool = torch.eye(new_heads, dtype=weight.dtype).repeat_interleave(group, 1) / group
    merged = torch.einsum("ng,gdh->ndh", pool, weight.unflatten(0, (num_key_value_heads, -1))).flatten(0, 1)
    return merged, bias if bias is None else (pool @ bias.reshape(num_key_value_heads, -1)).flatten()
"""
_SETS = """
class BlockAllocator:
    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.sequences = {}

    def _unused(self):
        used = {block for blocks, _ in self.sequences.values() for block in blocks}
        return [block for block in range(self.num_blocks) if block not in used]

    def allocate(self, seq_id, num_tokens):
        needed, unused = (num_tokens + self.block_size - 1) // self.block_size, self._unused()
        if needed > len(unused):
            raise MemoryError
        self.sequences[seq_id] = (tuple(unused[:needed]), num_tokens)
        return self.sequences[seq_id][0]

    def append(self, seq_id):
        blocks, length = self.sequences[seq_id]
        others = {b for seq, (table, _) in self.sequences.items() if seq != seq_id for b in table}
        room = length < len(blocks) * self.block_size
        if not room or blocks[-1] in others:
            unused = self._unused()
            if not unused:
                raise MemoryError("full")
            blocks = (blocks[:-1] if room else blocks) + (unused[-1],)
        self.sequences[seq_id] = (blocks, length + 1)
        return blocks

    def fork(self, seq_id, new_id):
        self.sequences[new_id] = self.sequences[seq_id]
        return self.sequences[new_id][0]

    def free(self, seq_id):
        return self.sequences.pop(seq_id)
"""
_FUSED = """
import torch
import torch.nn.functional as F

def fixed_attention(query, key, value, past=None):
    if past:
        key, value = (torch.cat(pair, 2) for pair in zip(past, (key, value)))
    length = torch.arange(key.shape[2])
    seen = length <= length[-query.shape[2] :, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True), [key, value]
"""
_GROUPED = """
import torch

def fixed_attention(query, key, value, past=None):
    if past is not None:
        key, value = torch.cat((past[0], key), -2), torch.cat((past[1], value), -2)
    kv_heads, start = key.shape[1], key.shape[2] - query.shape[2]
    grouped = query.unflatten(1, (kv_heads, -1)).double()
    scores = torch.einsum("bhgqd,bhkd->bhgqk", grouped, key.double()) * query.shape[-1] ** -0.5
    for i in range(query.shape[2]):
        scores[..., i, start + i + 1 :] = -1e30
    output = torch.einsum("bhgqk,bhkd->bhgqd", scores.softmax(-1), value.double())
    return output.flatten(1, 2).to(query.dtype), (key, value)
"""

ALSO_RIGHT: dict[str, list[str]] = {
    "cache_size": [_BY_LOOP, _EXACT_BITS],
    "merge_heads": [_HEAD_BY_HEAD, _BY_MATRIX],
    "block_allocator": [_SETS, _block(("self.unused.pop()", "self.unused.pop(0)"))],
    "fixed_attention": [_FUSED, _GROUPED],
}
