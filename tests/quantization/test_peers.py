"""Other libraries run by subprocess: here by stand-ins; what is slow uses the real ones where they are installed."""

import ast
import dataclasses
import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit._paths import DATA
from labkit.models import tiny_model
from labkit.quality import perplexity
from labkit.quantization import AWQConfig, GPTQConfig, RTNConfig, _peer_process, peers, quantize_
from labkit.quantization._peer_checkpoint import dequantized, read_checkpoint
from labkit.quantization._peer_environments import find
from labkit.quantization.checkpoint import save_quantized
from labkit.quantization.linear import QuantLinear
from labkit.quantization.peers import PEERS, PeerFailed, PeerUnavailable, missing, read_back, run_peer

RUNNERS = Path(peers.__file__).parent / "_peer_runners"
CALIBRATION = torch.arange(4 * 32).view(4, 32) % 256
EVALUATION = (torch.arange(2 * 32) * 7 % 256).view(2, 32)
RESULT = {"seconds": 1.5, "versions": {"gptqmodel": "7.6.0"}, "notes": ["a note"]}


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A folder that looks like GPTQModel's environment; its interpreter is this one."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "lib/python3.11/site-packages/gptqmodel").mkdir(parents=True)
    python = folder / "bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("LABKIT_QUANTLIBS", str(folder))
    return folder


@pytest.fixture
def stand_in(environment, tmp_path):
    """Gives GPTQModel as a peer whose runner is a few lines of Python; `folder` is the job's."""

    def make(program: str):
        script = tmp_path / "runner.py"
        head = "import json, os, pathlib, shutil, sys, time\nfolder = pathlib.Path(sys.argv[1])\n"
        script.write_text(head + program)
        return dataclasses.replace(find("gptqmodel"), runner=str(script))

    return make


def quantized(config, **overrides):
    model = tiny_model(**overrides)
    quantize_(model, config, None if isinstance(config, RTNConfig) else CALIBRATION, progress=False)
    return model


def run(peer, **options):
    return run_peer(peer, tiny_model(), CALIBRATION, EVALUATION, group_size=32, **options)


def matrices(model):
    return {name: m.portable() for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def test_a_run_hands_over_model_ids_and_settings_and_measures_the_checkpoint(stand_in, tmp_path):
    other = quantized(RTNConfig(bits=2, group_size=32))
    save_quantized(other, None, tmp_path / "made", format="gptq")
    program = f"""
shutil.copytree({str(tmp_path / "made")!r}, folder / "checkpoint")
result = {RESULT!r} | {{"notes": [os.environ.get("PYTHONPATH", "none"), os.environ["OMP_NUM_THREADS"]]}}
(folder / "result.json").write_text(json.dumps(result))
"""
    job = tmp_path / "job"
    job.mkdir()
    result = run(stand_in(program), folder=job, bits=2, desc_act=False, damp_percent=0.05, threads=1)
    assert result.notes == ("none", "1")
    assert (result.seconds, result.version, result.threads) == (1.5, "7.6.0", 1)
    settings = {"method": "GPTQ", "bits": 2, "group_size": 32, "sym": False, "desc_act": False}
    settings |= {"damp_percent": 0.05, "dtype": "float32", "threads": 1}
    assert json.loads((job / "settings.json").read_text()) == settings
    assert torch.equal(load_file(job / "tokens.safetensors")["calibration"], CALIBRATION)
    weights = load_file(job / "model/model.safetensors")
    assert torch.equal(weights["model.norm.weight"], tiny_model().model.norm.weight)
    assert {path.suffix for path in job.rglob("*") if path.is_file()} <= {".json", ".safetensors", ".txt"}
    # Two bits of a tiny model move its perplexity far; the model handed in is the baseline, and stays that.
    float_loss = perplexity(tiny_model(), EVALUATION.reshape(-1), 32)
    assert result.baseline == pytest.approx(float_loss)
    assert result.perplexity == pytest.approx(perplexity(other, EVALUATION.reshape(-1), 32), rel=0.02)
    assert abs(result.perplexity / float_loss - 1) > 0.1
    assert result.nbytes == sum(path.nbytes for path in stored(tmp_path / "made"))


def stored(folder):
    kinds = ("qweight", "qzeros", "scales", "g_idx")
    return [t for name, t in load_file(folder / "model.safetensors").items() if name.endswith(kinds)]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print('the reason', file=sys.stderr); sys.exit(3)", "stopped with status 3.*the reason"),
        (
            "print('x\\r' * 99 + 'the last', flush=True); raise MemoryError",
            "stopped with status 1. It last said:\nthe last\n.*MemoryError",
        ),
        ("print('nearly')", "wrote no result.json.*nearly"),
        ("(folder / 'result.json').write_text('{')", "is no JSON"),
        ("(folder / 'result.json').write_text('[1]')", "without seconds and versions"),
        (f"(folder / 'result.json').write_text({json.dumps(RESULT)!r})", "without a checkpoint that can be read"),
    ],
)
def test_a_run_without_a_result_says_what_was_printed_last(stand_in, program, says):
    with pytest.raises(PeerFailed, match=f"(?s)GPTQModel.*{says}"):
        run(stand_in(program))


def test_what_takes_too_long_is_stopped_with_all_that_it_started(stand_in, tmp_path):
    program = f"""
child = os.fork()
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child or os.getpid()))
print("waiting", flush=True)
time.sleep(60)
"""
    start = time.monotonic()
    with pytest.raises(PeerFailed, match="(?s)did not end within 2 s and was stopped.*waiting"):
        run(stand_in(program), timeout_s=2.0)
    child = int((tmp_path / "child").read_text())
    while is_running(child):
        assert time.monotonic() - start < 40
        time.sleep(0.05)


def is_running(pid):
    """Not ended; a zombie that nobody has asked after has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_not_installed_says_how_to_get_it(environment, monkeypatch, tmp_path):
    assert missing("gptqmodel") is None and missing("labkit") is None
    (environment / "lib/python3.11/site-packages/gptqmodel").rmdir()
    assert "GPTQModel is not in it: make quantlibs goes on" in missing("gptqmodel")
    monkeypatch.setenv("LABKIT_QUANTLIBS", str(tmp_path / "none"))
    assert missing("gptqmodel") == "GPTQModel is not installed (no none): make quantlibs installs it"
    (tmp_path / "work").mkdir()
    with pytest.raises(PeerUnavailable, match="make quantlibs"):
        run("gptqmodel", folder=tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())
    (tmp_path / "work" / "checkpoint").mkdir()
    with pytest.raises(ValueError, match="folder: .*takes an empty folder"):
        run("gptqmodel", folder=tmp_path / "work")
    with pytest.raises(PeerUnavailable, match="make quantlibs"):
        read_back(tmp_path, EVALUATION)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"peer": "autogpt"}, "peer: got 'autogpt'.*did you mean autogptq"),
        ({"peer": "autoawq"}, "method: got 'GPTQ'; takes one of AWQ"),
        ({"calibration_ids": torch.tensor([1])}, "calibration_ids: .*2 dimensions"),
        ({"evaluation_ids": torch.tensor([[256]])}, "evaluation_ids: got 'ids from 256"),
        ({"evaluation_ids": torch.tensor([[1], [2]])}, "evaluation_ids: .*at least 2 tokens"),
        ({"method": "AWQ", "bits": 3}, "bits: got 3; takes one of 4"),
        ({"model": torch.nn.Linear(2, 2)}, "model: got 'Linear'"),
        ({"threads": 0}, "threads: got 0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(environment, options, says):
    given = {"peer": "gptqmodel", "model": tiny_model(), "calibration_ids": CALIBRATION, "evaluation_ids": EVALUATION}
    with pytest.raises(ValueError, match=says):
        run_peer(**given | options)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (GPTQConfig(group_size=32), "gptq"),  # v2: asymmetric, act-order
        (RTNConfig(bits=8, group_size=32, sym=True), "gptq"),  # v1
        (AWQConfig(group_size=32), "awq"),  # norms that the scales were folded into
    ],
)
def test_a_checkpoint_is_read_back_to_the_values_that_it_stands_for(config, layout, tmp_path):
    model = quantized(config)
    save_quantized(model, None, tmp_path / "made", format=layout)
    base = tiny_model()
    found = dequantized(base, read_checkpoint(tmp_path / "made"))
    for name, weight in matrices(model).items():
        expected = weight.map(lambda t: t.half() if t.is_floating_point() else t).dequantize(torch.float32)
        assert torch.equal(found.get_submodule(name).weight, expected)
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(found.get_parameter(norm), model.get_parameter(norm).half().float())
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), tiny_model().parameters(), strict=True))


def test_autogptqs_words_zero_points_and_empty_biases_are_read_and_foreign_names_refused(tmp_path):
    model = quantized(RTNConfig(group_size=32))
    folder = save_quantized(model, None, tmp_path / "made", format="gptq")
    config = json.loads((folder / "config.json").read_text())
    for name in ("quant_method", "checkpoint_format"):
        del config["quantization_config"][name]
    (folder / "config.json").write_text(json.dumps(config))
    # It stores each zero point less one: of eight in a word, 0x11111111 less, as none of them is 0 here.
    stored = load_file(folder / "model.safetensors")
    stored |= {name: tensor - 0x11111111 for name, tensor in stored.items() if name.endswith("qzeros")}
    save_file(stored, folder / "model.safetensors")
    checkpoint = read_checkpoint(folder)
    name = "model.layers.0.mlp.up_proj"
    extra = dataclasses.replace(checkpoint, floats={**checkpoint.floats, f"{name}.bias": torch.zeros(128)})
    expected = matrices(model)[name].dequantize(torch.float32)
    assert torch.allclose(dequantized(tiny_model(), extra).get_submodule(name).weight, expected, rtol=1e-3)
    for floats in ({f"{name}.bias": torch.ones(128)}, {"model.norm.weigth": torch.ones(64)}):
        with pytest.raises(ValueError, match="checkpoint: got 'model"):
            dequantized(tiny_model(), dataclasses.replace(checkpoint, floats=floats))
    # What a library left out would keep its float value.
    left = {other: weight for other, weight in checkpoint.matrices.items() if other != name}
    with pytest.raises(ValueError, match=f"checkpoint: got 'one without {name}.weight'"):
        dequantized(tiny_model(), dataclasses.replace(checkpoint, matrices=left))


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format: got 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version: got 'gemv'"),
        ({"quant_method": "hqq"}, "quant_method: got 'hqq'"),
    ],
)
def test_other_layouts_are_refused_and_never_misread(stored, says, tmp_path):
    folder = save_quantized(quantized(RTNConfig(group_size=32)), None, tmp_path / "made", format="gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"bits": 4, "group_size": 32, "sym": False} | stored
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        read_checkpoint(folder)


def test_an_environment_is_found_from_the_repository_and_told_no_secret(monkeypatch):
    monkeypatch.setenv("LABKIT_QUANTLIBS", "elsewhere")
    assert find("gptqmodel").folder == DATA.parent / "elsewhere"
    monkeypatch.setenv("LABKIT_QUANTLIBS", "/elsewhere")
    assert find("gptqmodel").folder == Path("/elsewhere")
    for name in ("TRITON_INTERPRET", "HF_TOKEN", "PYTHONPATH", "KEPT"):
        monkeypatch.setenv(name, "1")
    given = _peer_process._environment(find("gptqmodel"), 2)
    assert given["KEPT"] == "1" and not {"TRITON_INTERPRET", "HF_TOKEN", "PYTHONPATH"} & given.keys()


def test_the_model_that_transformers_4_is_given_keeps_its_rotary_base(tmp_path, monkeypatch):
    (tmp_path / "settings.json").write_text("{}")
    model = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 123456.0})
    model.save_pretrained(tmp_path / "model")
    monkeypatch.syspath_prepend(str(RUNNERS))
    monkeypatch.setattr(sys, "argv", ["runner", str(tmp_path)])
    spec = importlib.util.spec_from_file_location("labkit_test_legacy", RUNNERS / "legacy.py")
    legacy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(legacy)
    job = sys.modules["job"].Job()
    folder = legacy.rewrite_model(job)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 123456.0 and config["torch_dtype"] == "float32"
    assert "rope_parameters" not in config
    assert load_file(folder / "model.safetensors").keys() == load_file(tmp_path / "model/model.safetensors").keys()
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["rope_parameters"]["rope_type"] = "yarn"
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="type yarn"):
        legacy.old_config(job)


def test_runners_of_other_environments_import_no_labkit():
    for path in RUNNERS.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
        assert any(name.split(".")[0] == "labkit" for name in names) is (path.name == "run_labkit.py"), path.name


def test_every_peer_has_a_runner_and_a_list_of_packages_with_its_pin():
    lists = {".venv-quantlibs": "requirements-quantlibs.txt", ".venv-legacy": "requirements-legacy.txt"}
    root = Path(peers.__file__).parents[2]
    for peer in PEERS:
        assert peer.script.is_file()
        pinned = (root / lists[peer.environment]).read_text().replace("-", "")
        assert f"\n{peer.name}==" in pinned
    assert not find("autogptq").maintained and find("gptqmodel").maintained
