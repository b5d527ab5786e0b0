"""A wheel with a small stand-in for the default model, and its entry in the catalogue."""

import zipfile
from pathlib import Path
from types import MappingProxyType

import pytest

from labkit.model_files import catalogue
from labkit.model_files.catalogue import ModelInfo, WheelSource
from labkit.model_files.manifest import sha256
from tests.model_files.standin import fake_pip, write_gguf


@pytest.fixture(scope="session")
def standin_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelInfo]:
    """The wheel's file and the catalogue entry that names it."""
    folder = tmp_path_factory.mktemp("wheel")
    model, wheel = folder / "Standin.Q4_1.gguf", folder / "llm_standin-1.0-py3-none-any.whl"
    write_gguf(model)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(model, "llm_standin/Standin.Q4_1.gguf")
    source = WheelSource(
        package="llm-standin",
        version="1.0",
        file=wheel.name,
        bytes=wheel.stat().st_size,
        sha256=sha256(wheel),
        gguf="llm_standin/Standin.Q4_1.gguf",
        gguf_bytes=model.stat().st_size,
        gguf_sha256=sha256(model),
        rescale_seed=3,
    )
    shape = MappingProxyType({"model_type": "llama", "rope_theta": 10000.0})
    return wheel, ModelInfo(
        "standin", "nobody/standin", 100_000, "Apache-2.0", "standin", "memory", shape, source=source
    )


@pytest.fixture
def standin(
    standin_wheel: tuple[Path, ModelInfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, ModelInfo]:
    """The wheel and its entry, in the catalogue, with an empty cache and a pip that finds nothing."""
    wheel, info = standin_wheel
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    with_standin = {**catalogue.catalogue(), info.name: info}
    monkeypatch.setattr(catalogue, "catalogue", lambda: with_standin)
    fake_pip(tmp_path, monkeypatch, "raise SystemExit('ERROR: No matching distribution found for llm-standin==1.0')")
    return wheel, info
