"""The other libraries that quantize, beside this one: same model, same calibration tokens, one measure of perplexity.

Each runs in an environment and a process of its own, since what they need excludes one another. A folder of safetensors
and JSON goes there and comes back: never a pickle.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from labkit import _check
from labkit.model_files.convert import quiet_transformers
from labkit.models import LoadedModel, plain_model
from labkit.quality import perplexity
from labkit.quantization._peer_checkpoint import Checkpoint, dequantized, read_checkpoint
from labkit.quantization._peer_environments import OURS, PEERS, Peer, find, missing
from labkit.quantization._peer_process import PeerFailed, PeerUnavailable, cores, read_result, run_job, write_job
from labkit.quantization._peer_records import PeerResult, RecordedPeer, peers_table, recorded_peers

__all__ = [
    "OURS",
    "PEERS",
    "Peer",
    "PeerFailed",
    "PeerResult",
    "PeerUnavailable",
    "ReadBack",
    "RecordedPeer",
    "collect",
    "missing",
    "peers_table",
    "read_back",
    "recorded_peers",
    "run_peer",
]

# AWQ of GPTQModel and AutoAWQ refuse float32.
_DTYPES = {"GPTQ": "float32", "AWQ": "bfloat16"}


def _save_model(model: PreTrainedModel | LoadedModel, folder: Path) -> None:
    """The float model, with its tokenizer or a stand-in: GPTQModel wants one and is given token ids only."""
    bare = plain_model(model)
    with quiet_transformers():
        bare.save_pretrained(folder)
    if isinstance(model, LoadedModel):
        model.tokenizer.save_pretrained(folder)
        return
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{i}>": i for i in range(bare.config.vocab_size)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<0>", eos_token="<1>").save_pretrained(folder)


def _checked_ids(name: str, ids: Tensor, model: PreTrainedModel) -> Tensor:
    _check.tensor(name, ids, ndim=2, dtypes=(torch.int64, torch.int32))
    _check.require(ids.numel() > 0, name, f"shape {tuple(ids.shape)}", "at least one row of token ids")
    low, high, most = int(ids.min()), int(ids.max()), model.config.vocab_size - 1
    _check.require(0 <= low and high <= most, name, f"ids from {low} to {high}", f"ids from 0 to {most}")
    return ids


def run_peer(
    peer: Peer | str,
    model: PreTrainedModel | LoadedModel,
    calibration_ids: Tensor,
    evaluation_ids: Tensor,
    *,
    method: str = "GPTQ",
    bits: int = 4,
    group_size: int = 64,
    sym: bool = False,
    desc_act: bool = True,
    damp_percent: float = 0.01,
    dtype: str | None = None,
    threads: int | None = None,
    timeout_s: float = 3600.0,
    folder: Path | None = None,
) -> PeerResult:
    """Quantize `model`, a float one that stays as it is, with another library, and measure what came out.

    peer: one of PEERS, its name, or "labkit" for this package, in a process of its own like the others.
    calibration_ids: (n_samples, seq_len); evaluation_ids: (n_windows, context_length). method: "GPTQ" or "AWQ"; for AWQ
    desc_act and damp_percent count for nothing, and bits are 4. dtype: what it computes in; None for float32 with GPTQ,
    for bfloat16 with AWQ, which the others do not do in float32; this package's own is float32 for both. threads: None
    for all cores. folder: an empty one that keeps what the runner was given and wrote, `checkpoint/` among it.
    Errors: PeerUnavailable (a RuntimeError) where it is not installed, saying how to get it; PeerFailed for a run
    without a result, with the last lines that it printed; ValueError for wrong arguments.
    """
    peer, bare = find(peer), plain_model(model)
    _check.require(isinstance(bare, PreTrainedModel), "model", type(bare).__name__, "a float model of transformers")
    _check.choice("method", method, peer.methods)
    _check.choice("bits", bits, (4,) if method == "AWQ" else (2, 3, 4, 8))
    _check.number("timeout_s", timeout_s, 0.0)
    tokens = {"calibration": _checked_ids("calibration_ids", calibration_ids, bare)}
    shape = tuple(_checked_ids("evaluation_ids", evaluation_ids, bare).shape)
    _check.require(shape[1] > 1, "evaluation_ids", f"shape {shape}", "windows of at least 2 tokens")
    dtype = dtype or ("float32" if peer.name == OURS.name else _DTYPES[method])
    threads = cores() if threads is None else _check.integer("threads", threads, 1)
    settings = {"method": method, "bits": bits, "group_size": group_size, "sym": sym}
    settings |= {"desc_act": desc_act and method == "GPTQ", "damp_percent": damp_percent, "dtype": dtype}
    with tempfile.TemporaryDirectory(prefix="labkit_peer_") as temporary:
        work = Path(folder or temporary).resolve()
        empty = work.is_dir() and not any(work.iterdir())
        _check.require(empty, "folder", str(folder), "an empty folder, or None")
        _require_installed(peer)
        _save_model(model, work / "model")
        write_job(work, settings | {"threads": threads}, tokens)
        run_job(peer, peer.script, work, threads=threads, timeout_s=timeout_s)
        return collect(peer, model, evaluation_ids, work)


def collect(peer: Peer | str, model: PreTrainedModel | LoadedModel, evaluation_ids: Tensor, folder: Path) -> PeerResult:
    """What a runner left in the `folder` that `run_peer` was given, measured; arguments and errors as there."""
    peer, bare = find(peer), plain_model(model)
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    found = read_result(folder, peer.title)
    checkpoint = _checkpoint(peer, folder / "checkpoint")
    windows, length = evaluation_ids.reshape(-1), evaluation_ids.shape[1]
    return PeerResult(
        peer=peer.name,
        **settings,
        perplexity=perplexity(dequantized(bare, checkpoint), windows, length),
        baseline=perplexity(bare, windows, length),
        seconds=found["seconds"],
        nbytes=checkpoint.nbytes,
        device=str(found.get("device", "cpu")),
        model=model.name if isinstance(model, LoadedModel) else f"a {type(bare).__name__} of {bare.num_parameters():,}",
        versions=found["versions"],
        notes=tuple(found.get("notes", ())),
    )


def _require_installed(peer: Peer) -> None:
    """Before half a gigabyte is written for it."""
    reason = missing(peer)
    if reason:
        raise PeerUnavailable(reason)


def _checkpoint(peer: Peer, folder: Path) -> Checkpoint:
    try:
        return read_checkpoint(folder)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise PeerFailed(f"{peer.title} ended without a checkpoint that can be read: {error}") from error


@dataclass(frozen=True, eq=False)
class ReadBack:
    """A checkpoint loaded elsewhere: float32 `logits (n_windows, seq_len, vocab_size)` of its own kernels, which
    `kernels` names, and the seconds that they took."""

    logits: Tensor
    seconds: float
    kernels: tuple[str, ...]
    versions: Mapping[str, str]


def read_back(
    checkpoint: Path,
    ids: Tensor,
    *,
    dtype: str = "float32",
    backend: str = "auto",
    threads: int | None = None,
    timeout_s: float = 900.0,
) -> ReadBack:
    """A checkpoint of `save_quantized` as `transformers` loads it in GPTQModel's environment.

    ids: (n_windows, seq_len). dtype: of the loaded model. backend: GPTQModel's kernels: "auto" for its choice, or
    "torch" for PyTorch's matmul on dequantized weights; compressed-tensors has one way only.
    Errors: as `run_peer`.
    """
    peer = find("gptqmodel")
    _require_installed(peer)
    _check.tensor("ids", ids, ndim=2, dtypes=(torch.int64, torch.int32))
    threads = cores() if threads is None else _check.integer("threads", threads, 1)
    settings = {"checkpoint": str(Path(checkpoint).resolve()), "dtype": dtype, "backend": backend}
    with tempfile.TemporaryDirectory(prefix="labkit_peer_") as temporary:
        work = Path(temporary)
        write_job(work, settings | {"threads": threads}, {"ids": ids})
        script = peer.script.with_name("run_read_back.py")
        found = run_job(peer, script, work, threads=threads, timeout_s=timeout_s)
        logits = load_file(work / "logits.safetensors")["logits"]
    return ReadBack(logits, found["seconds"], tuple(found.get("kernels", ())), found["versions"])
