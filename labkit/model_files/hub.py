"""A model from the Hugging Face Hub: safetensors and tokenizer only, each weight file verified once."""

from __future__ import annotations

import re
from pathlib import Path

from labkit._paths import cache_dir
from labkit._progress import progress, say
from labkit.model_files import manifest
from labkit.model_files.catalogue import catalogue
from labkit.model_files.fetch import ModelUnavailable, cached

# No pickled weights and no Python code: nothing that a download could run.
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model"]


def is_hub_id(name: str) -> bool:
    """Has it the form `owner/model`?"""
    part = r"(?!.*(--|\.\.))[A-Za-z0-9_]([\w.-]*[A-Za-z0-9_])?"
    return len(name) <= 96 and all(re.fullmatch(part, each) for each in name.split("/")) and name.count("/") == 1


def snapshot(hub_id: str) -> Path:
    """The folder of the model in the Hub's own cache, downloaded as far as it is missing.

    Errors: ModelUnavailable without a network, for a model that does not exist, and for one whose licence has not
    been accepted; it names the models at hand.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_FILES))
    except GatedRepoError as error:
        how = f"accept its licence at https://huggingface.co/{hub_id} and log in with `hf auth login`"
        raise ModelUnavailable(f"{hub_id} is gated: {how}; {_at_hand()}") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(f"{hub_id} is not on the Hub, or it is private; {_at_hand()}") from error
    except (OSError, HfHubHTTPError) as error:
        why = "there is no connection to the Hub and it is not in the Hub's cache on this machine"
        raise ModelUnavailable(f"{hub_id} cannot be had: {why}; {_at_hand()}") from error
    _verify(hub_id, folder)
    return folder


def _at_hand() -> str:
    """The models that load here without a network."""
    ready = [name for name, info in catalogue().items() if info.source and cached(info)[0]]
    wheels = [name for name, info in catalogue().items() if info.source]
    names = ", ".join(ready or wheels)
    return f"at hand {'without a network' if ready else 'from the package index'}: {names}, or any local folder"


def _verify(hub_id: str, folder: Path) -> None:
    """Compare each weight file with its SHA-256, which is the name of the blob that the Hub's cache links it to.

    Done once a file: its stamp holds size and time of change. A damaged file is deleted, so that it is fetched anew.
    """
    stamps = cache_dir() / "hub-verified"
    stamps.mkdir(exist_ok=True)
    for link in sorted(folder.glob("*.safetensors")):
        blob = link.resolve()
        if not re.fullmatch(r"[0-9a-f]{64}", blob.name):
            continue  # a cache without links (Windows) keeps no digest to compare with
        stamp, stat = stamps / blob.name, blob.stat()
        expected = f"{stat.st_size} {stat.st_mtime_ns}"
        if stamp.is_file() and stamp.read_text() == expected:
            continue
        say(f"{hub_id}: verifying {link.name} ({stat.st_size / 1e9:.2f} GB, once)")
        with progress(f"{hub_id}: verifying", stat.st_size) as update:
            digest = manifest.sha256(blob, update)
        if digest != blob.name:
            blob.unlink()
            link.unlink(missing_ok=True)
            raise ModelUnavailable(f"{hub_id}: {link.name} was damaged and is deleted; load it again to fetch it anew")
        stamp.write_text(expected)
