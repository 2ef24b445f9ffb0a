"""LoRA adapters behind the server: a request chooses one by the model's name."""

from __future__ import annotations

from llm_architectures import TOKENS, write_model
from peft_adapters import ALL, write_adapter
from serving_http import send, serving


def test_the_name_of_a_model_chooses_the_adapter(tmp_path):
    write_model(tmp_path / "m", "llama3")
    write_adapter(tmp_path / "m", tmp_path / "a", ALL)
    with serving(tmp_path / "m", streams=2) as server:
        server.model.load_adapter("mine", tmp_path / "a")
        _, _, listed = send(server.url, "/v1/models", method="GET")
        assert [each["id"] for each in listed["data"]] == ["m", "mine"]
        assert send(server.url, "/v1/models/mine", method="GET")[2]["parent"] == "m"
        for name, adapter in (("m", None), ("mine", "mine"), ("m", None), ("other", None)):
            body = {"model": name, "prompt": TOKENS[:9], "max_tokens": 8, "temperature": 0, "logprobs": 0}
            status, headers, answer = send(server.url, "/v1/completions", body)
            assert status == 200, answer
            assert ("x-billfish-model" in {key.lower() for key in headers}) == (name == "other")
            alone = server.model.generate(TOKENS[:9], max_tokens=8, adapter=adapter, activations="exact")
            assert answer["choices"][0]["text"] == alone.text
