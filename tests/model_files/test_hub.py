"""Models from the Hub, with the Hub's own client replaced: errors in one sentence, weights verified once."""

import hashlib
import os

import httpx
import pytest

from labkit import models
from labkit.model_files import hub
from labkit.models import ModelUnavailable


@pytest.fixture
def client(monkeypatch, tmp_path):
    """`snapshot_download` replaced by what the test puts in; the calls it got."""
    import huggingface_hub

    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    calls = []

    def install(result):
        def snapshot_download(hub_id, **options):
            calls.append((hub_id, options))
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return install


def hub_error(kind: str) -> Exception:
    import huggingface_hub.errors as errors

    if kind == "offline":
        return errors.LocalEntryNotFoundError("no connection")
    response = httpx.Response(403, request=httpx.Request("GET", "https://example.invalid"))
    return getattr(errors, kind)("refused", response=response)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("offline", "no connection to the Hub"),
        ("GatedRepoError", "accept its licence"),
        ("RepositoryNotFoundError", "is not on the Hub, or it is private"),
        ("HfHubHTTPError", "no connection to the Hub"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence_that_names_the_models_at_hand(client, kind, says):
    client(hub_error(kind))
    with pytest.raises(ModelUnavailable) as caught:
        models.load_model("Qwen/Qwen3-0.6B", device="cpu")
    message = str(caught.value)
    assert message.startswith("Qwen/Qwen3-0.6B") and says in message and "\n" not in message
    assert "smollm2-135m" in message and "any local folder" in message


def test_a_catalogue_name_asks_for_its_hub_id_and_for_no_code_or_pickles(client):
    calls = client(hub_error("offline"))
    with pytest.raises(ModelUnavailable, match="Qwen/Qwen2.5-0.5B-Instruct"):
        models.fetch_model("qwen2.5-0.5b")
    hub_id, options = calls[0]
    assert hub_id == "Qwen/Qwen2.5-0.5B-Instruct"
    patterns = " ".join(options["allow_patterns"])
    assert "*.safetensors" in patterns and ".bin" not in patterns and ".py" not in patterns and ".pt" not in patterns


def hub_cache(folder, content: bytes):
    """A snapshot as the Hub's cache lays it out: a link whose target is named by the SHA-256."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob = blobs / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(blob)
    return snapshot, blob


def test_weights_are_verified_once(client, tmp_path, monkeypatch, capsys):
    snapshot, blob = hub_cache(tmp_path / "hub", b"weights")
    client(snapshot)
    assert hub.snapshot("owner/model") == snapshot
    assert "verifying model.safetensors" in capsys.readouterr().err
    monkeypatch.setattr(hub.manifest, "sha256", lambda *_: pytest.fail("hashed again"))
    assert hub.snapshot("owner/model") == snapshot and capsys.readouterr().err == ""


def test_a_damaged_weight_file_is_deleted_and_never_loaded(client, tmp_path):
    snapshot, blob = hub_cache(tmp_path / "hub", b"weights")
    client(snapshot)
    hub.snapshot("owner/model")
    blob.write_bytes(b"weighty")  # as long, and verified before
    os.utime(blob, ns=(1, 1))
    with pytest.raises(ModelUnavailable, match="was damaged and is deleted"):
        hub.snapshot("owner/model")
    assert not blob.exists() and not (snapshot / "model.safetensors").is_symlink()


@pytest.mark.parametrize(("name", "is_id"), [("a/b", True), ("a/b/c", False), ("a", False), ("../b c", False)])
def test_what_looks_like_a_hub_id(name, is_id):
    assert hub.is_hub_id(name) is is_id
