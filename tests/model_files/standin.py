"""Stand-ins for the default model's GGUF, small enough to be converted in a test, and for the pip that fetches it."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path) -> None:
    """A Llama in Q4_1 with a byte-level tokenizer, as the default model's file is built."""
    # The printable stand-ins that a byte-level vocabulary uses for the 256 bytes.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden_bytes = [chr(256 + position) for position in range(256 - len(shown))]
    tokens = [*SPECIAL, *(chr(byte) for byte in shown), *hidden_bytes, "he", "ll"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    _add_weights(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    random = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> None:
        values = random.normal(0.0, 0.2, (rows, columns)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    add("token_embd.weight", vocab_size, HIDDEN, q8)
    writer.add_tensor("output_norm.weight", random.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}{norm}.weight", random.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
        add(f"{at}attn_q.weight", HEADS * HEAD_DIM, HIDDEN, q4)
        add(f"{at}attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN, q4)
        add(f"{at}attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN, q4)
        add(f"{at}attn_output.weight", HIDDEN, HEADS * HEAD_DIM, q4)
        add(f"{at}ffn_gate.weight", INTERMEDIATE, HIDDEN, q4)
        add(f"{at}ffn_up.weight", INTERMEDIATE, HIDDEN, q4)
        add(f"{at}ffn_down.weight", HIDDEN, INTERMEDIATE, q4)


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """`python -m pip` runs `body` in child processes; in it, `dest` is the folder to download into."""
    package = folder / "fake" / "pip"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    head = "import pathlib, shutil, sys, time\ndest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
    (package / "__main__.py").write_text(head + body + "\n")
    paths = [str(folder / "fake"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def put_in_downloads(cache: Path, *files: Path) -> Path:
    """Copy files to where a machine without a network looks for them."""
    downloads = cache / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for file in files:
        (downloads / file.name).write_bytes(file.read_bytes())
    return downloads
