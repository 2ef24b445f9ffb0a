"""A small storm of serving_storm.py: clients that leave, read slowly or send what is broken, all at once."""

from __future__ import annotations

import pytest
import serving_storm
from llm_models import Small, write_model
from serving_http import serving


@pytest.mark.promise("server", "with `--activations exact` an answer does not depend on what else is served")
def test_a_small_storm(tmp_path):
    write_model(tmp_path / "small.gguf", Small(context=256))
    with serving(tmp_path / "small.gguf", streams=3, queue=2) as server:
        pool = serving_storm.known_answers(server.model, 12)
        storm = serving_storm.Storm(server.url, pool, requests=200, clients=8)
        storm.run()
        assert serving_storm.settled(server.url)
        counts = server.engine.counts()
    assert storm.wrong == []
    assert storm.done.total() == 200
    assert storm.done.keys() == {kind.__name__ for kind in serving_storm.KINDS}
    assert counts.finished["failed"] == 0
    assert counts.finished["cancelled"] > 0
    assert counts.refused >= storm.refused > 0
