"""Which OpenAI-compatible server there is to measure; and where there is none, how to start one."""

import asyncio
import os
from dataclasses import dataclass, field
from types import ModuleType
from urllib.parse import urlsplit

from labkit import _check
from labkit.engine.serving.event_loop import in_own_thread

BASE_URL_VARIABLE = "LABKIT_OPENAI_BASE_URL"
API_KEY_VARIABLES = ("LABKIT_OPENAI_API_KEY", "OPENAI_API_KEY")
_KEY_COMES_FROM = f"api_key=, {' or '.join(API_KEY_VARIABLES)}"

_HOW_TO_START = f"""\
To start vLLM on a machine with an NVIDIA GPU and Docker (binder/vllm/README.md has more):
  1. Export a checkpoint, as chapter 02 does:
       save_quantized(model, tokenizer, "checkpoint")
  2. In the course's folder, with a key of your own:
       export VLLM_API_KEY=... CHECKPOINT_DIR="$PWD/notebooks/checkpoint"
       docker compose -f binder/vllm/compose.yaml up --wait
  3. Say where it is, and start JupyterLab from the same shell:
       export {BASE_URL_VARIABLE}=http://127.0.0.1:8000/v1 {API_KEY_VARIABLES[0]}="$VLLM_API_KEY"
Any other OpenAI-compatible server will do: find_server("http://host:port/v1", api_key=...)."""


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server that answered.

    base_url: with its `/v1`. model: the name that requests ask for. owned_by: what the server gives as the model's
    owner, which for vLLM is "vllm".
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    owned_by: str | None = None


@dataclass(frozen=True, repr=False)
class NoServer:
    """No server to measure, and why: false in a condition, and shown as what to do about it."""

    reason: str

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"No server to measure: {self.reason}.\n\n{_HOW_TO_START}"


def openai_library() -> ModuleType:
    """The official client, imported when a server is asked for. Errors: ImportError that says how to install it."""
    try:
        import openai
    except ImportError as error:
        raise ImportError(
            "a server is measured through the package `openai`, which is not installed; requirements.txt pins it: "
            "`make setup`, or pip install -r requirements.txt"
        ) from error
    return openai


def find_server(
    base_url: str | None = None, api_key: str | None = None, *, model: str | None = None, timeout_s: float = 5.0
) -> Server | NoServer:
    """The server at `base_url`, if it lists its models within `timeout_s` seconds. Nothing is raised for one that
    does not: a NoServer says why, and how to start one.

    base_url: such as "http://127.0.0.1:8000/v1", None for the environment's LABKIT_OPENAI_BASE_URL. A path is taken as
    it is; without one, `/v1` is added. api_key: None for LABKIT_OPENAI_API_KEY or OPENAI_API_KEY. model: one of those
    that the server lists, None for its first. Errors: ValueError for arguments of another kind.
    """
    for name, value in {"base_url": base_url, "api_key": api_key, "model": model}.items():
        _check.require(isinstance(value, str | None), name, value, "text, or None")
    _check.number("timeout_s", timeout_s, 0.1)
    # An empty variable is what a shell leaves of one that was cleared.
    base_url = base_url or os.environ.get(BASE_URL_VARIABLE)
    if not base_url:
        return NoServer(f"{BASE_URL_VARIABLE} is not set")
    api_key = api_key or next(filter(None, map(os.environ.get, API_KEY_VARIABLES)), None)
    base_url = base_url.rstrip("/")
    wrong = _wrong_url(base_url) or _wrong_key(api_key)
    if wrong:
        return NoServer(wrong)
    base_url = base_url if urlsplit(base_url).path else f"{base_url}/v1"
    try:
        served = in_own_thread(_models(base_url, api_key, timeout_s))
    except Exception as error:  # whatever a stranger's server answers, a notebook goes on
        return NoServer(_why(error, base_url, timeout_s))
    if not served:
        return NoServer(f"{base_url} lists no model")
    if model is not None and model not in served:
        return NoServer(f"{base_url} does not serve {model!r}, but {', '.join(served)}")
    model = model or next(iter(served))
    return Server(base_url, model, api_key, served[model])


def _wrong_url(url: str) -> str | None:
    """What is wrong with a base URL, as far as that shows before asking."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        secret = parts.username is not None or parts.password is not None
        _ = parts.port  # raises for one that is no port
    except ValueError:
        usable, secret = False, "@" in url
    if secret:  # not repeated: it would stand in a notebook's output
        return f"the base URL holds a user name or password; give the key in {API_KEY_VARIABLES[0]} instead"
    return None if usable else f"{url!r} is no base URL; one looks like http://127.0.0.1:8000/v1"


def _wrong_key(key: str | None) -> str | None:
    """A key that no header can carry, such as one with the end of its line; it is not repeated."""
    if key is None or (key.isascii() and key.isprintable() and " " not in key):
        return None
    return f"the API key holds a space, an end of line or a letter that a key cannot; it comes from {_KEY_COMES_FROM}"


async def _models(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, str | None]:
    """Names of the models that a server lists, in its order, each with its owner."""
    openai = openai_library()
    # The client insists on a key; servers without one take any. Its own limit is for a silence, and one that drips a
    # byte now and then is never silent: the other limit is for all of it.
    settings = {"base_url": base_url, "api_key": api_key or "none", "max_retries": 0, "timeout": timeout_s}
    async with asyncio.timeout(timeout_s), openai.AsyncOpenAI(**settings) as client:
        listed = await client.models.list()
        return {str(entry.id): getattr(entry, "owned_by", None) for entry in listed.data}


def _why(error: Exception, base_url: str, timeout_s: float) -> str:
    """One sentence, without the key, on why a server could not be asked."""
    if isinstance(error, ImportError):
        return str(error)
    openai = openai_library()
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return f"{base_url} refuses the API key (HTTP {error.status_code}); it comes from {_KEY_COMES_FROM}"
    if isinstance(error, openai.APITimeoutError | TimeoutError):
        return f"{base_url} did not answer within {timeout_s:g} s"
    if isinstance(error, openai.APIConnectionError):
        return f"nothing answers at {base_url} ({error.__cause__ or error})"
    if isinstance(error, openai.APIStatusError):
        return f"{base_url}/models answers HTTP {error.status_code}; a base URL mostly ends in /v1"
    return f"{base_url}/models does not answer as an OpenAI-compatible server does ({type(error).__name__})"
