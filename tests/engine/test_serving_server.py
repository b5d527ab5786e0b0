"""Finding a server, and what is said where there is none; the compose file that starts one."""

import contextlib
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from labkit.engine.serving import NoServer, Server, find_server, measure_serving
from labkit.engine.serving.server import API_KEY_VARIABLES, BASE_URL_VARIABLE
from tests.engine.openai_stand_in import MODEL, running

FOLDER = Path(__file__).resolve().parents[2] / "binder" / "vllm"
KEY = "a-key-of-the-tests"


@pytest.fixture(autouse=True)
def _no_server_of_the_users(monkeypatch):
    for name in (BASE_URL_VARIABLE, *API_KEY_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_no_server_is_text_that_says_how_to_start_one():
    found = find_server()
    assert isinstance(found, NoServer) and not found
    text = repr(found)
    assert text.startswith(f"No server to measure: {BASE_URL_VARIABLE} is not set")
    named = [BASE_URL_VARIABLE, API_KEY_VARIABLES[0], "VLLM_API_KEY", "CHECKPOINT_DIR", "save_quantized"]
    for name in [*named, "binder/vllm/compose.yaml", "binder/vllm/README.md"]:
        assert name in text
    for path in re.findall(r"binder/[\w/.]+\b", text):
        assert (FOLDER.parents[1] / path).is_file()
    # The same on every machine and at every hour, since a notebook keeps it.
    assert repr(find_server()) == text and str(Path.home()) not in text


def test_address_and_key_come_from_the_environment(monkeypatch):
    with running(key=KEY) as stand_in:
        monkeypatch.setenv(BASE_URL_VARIABLE, stand_in.url)
        for name in reversed(API_KEY_VARIABLES):  # the course's own wins over the client's
            monkeypatch.setenv(name, KEY)
            assert find_server() == Server(stand_in.url, MODEL, KEY, "tests")
            monkeypatch.setenv(name, "wrong")
            assert not find_server()
            assert find_server(api_key=KEY)
        monkeypatch.setenv(BASE_URL_VARIABLE, "")
        assert not find_server()
        assert find_server(stand_in.url, KEY)


def test_a_wrong_key_is_reported_and_shown_nowhere():
    with running(key=KEY) as stand_in:
        for wrong in ("not-the-key", None):
            found = find_server(stand_in.url, wrong)
            assert not found and "refuses the API key (HTTP 401)" in found.reason
            assert "not-the-key" not in repr(found)
        assert KEY not in repr(find_server(stand_in.url, KEY))
        # The key that was taken back between the two.
        load = {"concurrency": 1, "num_prompts": 2, "num_warmups": 0}
        result = measure_serving(Server(stand_in.url, MODEL, "not-the-key"), ["Hello"], **load)
    assert result.levels[0].failed == 2 and "401" in repr(result)
    assert "not-the-key" not in repr(result)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_base_url_is_taken_with_and_without_its_path(ending):
    with running() as stand_in:
        host = stand_in.url.removesuffix("/v1")
        assert find_server(host + ending).base_url == stand_in.url
        other = find_server(f"{host}/v2")
    assert not other and "/v2/models answers HTTP 404" in other.reason


def test_a_model_is_chosen_from_those_served():
    with running(models=("first", "second")) as stand_in:
        assert find_server(stand_in.url).model == "first"
        assert find_server(stand_in.url, model="second").model == "second"
        missing = find_server(stand_in.url, model="third")
        assert not missing and "'third'" in missing.reason and "first, second" in missing.reason
    with running(models=()) as stand_in:
        assert "lists no model" in find_server(stand_in.url).reason


def test_nobody_there():
    found = find_server(f"http://127.0.0.1:{free_port()}/v1")
    assert not found and "nothing answers at http://127.0.0.1" in found.reason


def test_somebody_there_who_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = find_server(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", timeout_s=0.2)
    assert not found and "did not answer within 0.2 s" in found.reason


def test_somebody_there_who_never_ends():
    """Each byte comes in time; all of them never do."""
    with socket.create_server(("127.0.0.1", 0)) as dripping:
        dripping.settimeout(5)
        ended = threading.Event()

        def drip():
            with contextlib.suppress(OSError), dripping.accept()[0] as connection:
                for _ in range(200):
                    connection.sendall(b"H")
                    if ended.wait(0.05):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        found = find_server(f"http://127.0.0.1:{dripping.getsockname()[1]}/v1", timeout_s=0.4)
        took = time.monotonic() - begin
        ended.set()
        thread.join()
    assert not found and "within 0.4 s" in found.reason
    assert took < 5


@pytest.mark.parametrize("key", ["two words", "a-key\n", "a-k\u00e9y", "a-key\x00"])
def test_a_key_that_no_header_carries_is_not_repeated(key):
    found = find_server("http://127.0.0.1:1/v1", key)
    assert not found and found.reason.startswith("the API key holds")
    assert key not in repr(found)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://", "http://[::1", "http://a:99999"])
def test_what_is_no_base_url(url):
    found = find_server(url)
    assert not found and "is no base URL" in found.reason


@pytest.mark.parametrize("url", ["http://me:secret@localhost/v1", "http://me:secret@[::1/v1"])
def test_a_password_in_the_url_is_not_repeated(url):
    found = find_server(url)
    assert not found and "secret" not in repr(found)


@pytest.mark.parametrize("wrong", [{"base_url": 8000}, {"api_key": 1}, {"model": []}, {"timeout_s": 0}])
def test_wrong_arguments_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: got"):
        find_server(**wrong)


def test_without_the_client_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    found = find_server("http://127.0.0.1:9/v1")
    assert not found and "requirements.txt" in found.reason
    with pytest.raises(ImportError, match=r"`openai`.*requirements\.txt"):
        measure_serving(Server("http://127.0.0.1:9/v1", MODEL), ["Hello"])


@pytest.fixture(scope="module")
def service():
    (service,) = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    return service


def test_compose_pins_the_official_image(service):
    assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+", service["image"])


def test_compose_mounts_the_weights_read_only_from_a_required_folder(service):
    (volume,) = service["volumes"]
    assert volume["type"] == "bind" and volume["read_only"] is True
    assert volume["source"].startswith("${CHECKPOINT_DIR:?")
    assert volume["bind"]["create_host_path"] is False
    assert service["command"][0] == volume["target"]
    assert service["environment"]["HF_HUB_OFFLINE"] == "1"


def test_compose_requires_a_key_and_keeps_it_out_of_the_command(service):
    assert service["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    assert "KEY" not in " ".join(service["command"])


def test_compose_is_reached_from_this_machine_only(service):
    (port,) = service["ports"]
    assert port.startswith("127.0.0.1:") and port.endswith(":8000")
    assert "network_mode" not in service and "expose" not in service


def test_compose_checks_health_after_time_to_load(service):
    check = service["healthcheck"]
    assert check["test"][0] == "CMD" and "/health" in check["test"][-1]
    compile(check["test"][-1], "health check", "exec")
    assert re.fullmatch(r"\d+m", check["start_period"]) and int(check["start_period"][:-1]) >= 5


def test_compose_shares_a_model_between_gpus_by_one_variable(service):
    size = "${TENSOR_PARALLEL_SIZE:-1}"
    assert f"--tensor-parallel-size={size}" in service["command"]
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert gpus["driver"] == "nvidia" and gpus["count"] == size and gpus["capabilities"] == ["gpu"]
    assert service["shm_size"] == "8gb"


def test_readme_names_every_variable_of_the_compose_file():
    used = set(re.findall(r"\$\{(\w+)", (FOLDER / "compose.yaml").read_text(encoding="utf-8")))
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", readme, flags=re.MULTILINE)) == used
    assert {"VLLM_API_KEY", "CHECKPOINT_DIR", "TENSOR_PARALLEL_SIZE"} <= used
    for command in re.findall(r"^ +(docker compose .*)$", readme, flags=re.MULTILINE):
        assert "binder/vllm/compose.yaml" in command
