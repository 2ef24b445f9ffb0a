"""Several API keys: none learns what another has asked, and they can be changed while the server runs."""

from __future__ import annotations

import logging
import signal
import sys

import pytest
from llm_models import Small, write_model
from serving_http import process, send, serving, until

from billfish.core.errors import DataError
from billfish.serving.http.keys import Keys
from billfish.serving.http.server import Server
from billfish.serving.ipc.session import Host

PROMPT = "The PIN is 4711. " * 5
BODY = {"prompt": PROMPT, "max_tokens": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("models") / "m.gguf"
    write_model(made, Small(context=512))
    return made


def cached(url: str, key: str, body: dict) -> int:
    code, _, answer = send(url, "/v1/completions", body, Authorization=f"Bearer {key}")
    assert code == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.promise(
    "server", "a key learns nothing of another's prompts by `cached_tokens` or time, unless `--share-prefixes` is set"
)
def test_a_key_does_not_see_what_another_has_asked(path):
    with serving(path, keys=["one", "two"], streams=4, queue=4) as server:
        assert cached(server.url, "one", BODY) == 0
        assert cached(server.url, "one", BODY) > 0
        for guess in ("4711", "1234"):
            assert cached(server.url, "two", {**BODY, "prompt": PROMPT.replace("4711", guess)}) == 0
        assert cached(server.url, "two", BODY) > 0  # its own
        assert cached(server.url, "one", BODY) > 0


@pytest.mark.promise(
    "server", "a key learns nothing of another's prompts by `cached_tokens` or time, unless `--share-prefixes` is set"
)
def test_a_slot_that_changes_its_owner_keeps_nothing(path):
    """One stream: each key in turn has the same slot."""
    with serving(path, keys=["one", "two"], streams=1, queue=4) as server:
        assert [cached(server.url, key, BODY) for key in ("one", "two", "one", "two")] == [0, 0, 0, 0]


def test_prefixes_may_be_shared(path):
    with serving(path, keys=["one", "two"], share_prefixes=True, streams=2, queue=4) as server:
        assert cached(server.url, "one", BODY) == 0
        assert cached(server.url, "two", BODY) > 0


@pytest.mark.promise("server", "SIGHUP replaces the API keys; logs hold no prompt")
def test_logs_hold_no_prompt(path, caplog):
    secret = "zqsecret"
    with caplog.at_level(logging.DEBUG), serving(path, streams=1, queue=1) as server:
        for body in (
            {"prompt": secret, "max_tokens": 1},
            {"prompt": secret, "max_tokens": 1, "unknown": secret},
            {"prompt": secret * 1000},
            {"prompt": {secret: secret}},
            {"messages": [{"role": "user", "content": secret}], "tools": secret},
        ):
            for place in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
                send(server.url, place, body)
    assert caplog.records
    assert secret not in caplog.text


def test_keys_that_cannot_be_read_stay_as_they_were(path, caplog):
    def broken() -> Keys:
        raise DataError("serve: no such file")

    keys = Keys(["old"])
    with serving(path, streams=1, queue=1) as running, caplog.at_level(logging.INFO):
        server = Server(Host(running.engine), running.service, keys, read_keys=broken)
        server.rotate_keys()
        assert len(keys) == 1
        assert "no such file" in caplog.text
        server = Server(Host(running.engine), running.service, keys, read_keys=lambda: Keys(["new", "newer"]))
        server.rotate_keys()
    assert keys.check("Bearer new") != keys.check("Bearer newer")


@pytest.mark.promise("server", "SIGHUP replaces the API keys; logs hold no prompt")
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGHUP")
@pytest.mark.process
def test_keys_are_read_again_at_sighup(path, tmp_path):
    file = tmp_path / "KEYS"
    file.write_text("old\n")

    def status(url: str, key: str) -> int:
        return send(url, "/v1/models", None, "GET", Authorization=f"Bearer {key}")[0]

    with process(str(path), "--api-key-file", str(file)) as (running, url):
        assert (status(url, "old"), status(url, "new")) == (200, 401)
        file.write_text("new\n")
        running.send_signal(signal.SIGHUP)
        until(lambda: status(url, "new") == 200)
        assert status(url, "old") == 401
        file.write_text("")  # nobody could get in any more, or everybody
        running.send_signal(signal.SIGHUP)
        assert status(url, "new") == 200
