"""The chat at / in a real browser: send, stream, stop, make anew, keep, a key, calls, Markdown; and nothing that a
model writes is HTML."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from llm_models import Small, write_model
from serving_http import serving
from site_support import browser

from billfish.serving.http.app import PAGE as FILE

pytest.importorskip("selenium", reason="needs selenium")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys as Pressed
from selenium.webdriver.support.ui import WebDriverWait

# What a model could do to a page that took its text for HTML.
ATTACK = "<img src=x onerror=\"document.title='owned'\"><b>bold</b><script>document.title='owned'</script>"
CONTEXT = 6000
FRAME = 1.0  # seconds, where a test makes frames slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(file, Small(context=CONTEXT))
    return file


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    made = browser(tmp_path_factory.mktemp("profile"), 390, 844)  # a phone: a window cannot be so narrow
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    made.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    yield made
    made.quit()


@pytest.fixture
def server(model):
    with serving(model, streams=2, context=CONTEXT) as running:
        yield running


def find(driver: object, name: str) -> object:
    return driver.find_element(By.ID, name)


def wait(driver: object, condition: object) -> None:
    WebDriverWait(driver, 30, 0.05).until(lambda _: condition())


def say(driver: object, text: str) -> None:
    find(driver, "prompt").send_keys(text + Pressed.ENTER)


def articles(driver: object) -> list[tuple[str, str]]:
    found = driver.find_elements(By.CSS_SELECTOR, "#log article")
    return [(each.get_attribute("class"), each.find_element(By.CLASS_NAME, "said").text) for each in found]


def idle(driver: object) -> bool:
    return find(driver, "send").is_displayed()


def asked(server: object, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The messages of the requests that come."""
    rendered = server.model.template.render
    assert server.service.syntax  # which is derived by rendering, too
    seen: list[list[dict[str, str]]] = []
    monkeypatch.setattr(
        server.model.template, "render", lambda messages, tools=None: seen.append(messages) or rendered(messages, tools)
    )
    return seen


def test_a_chat(driver, server, monkeypatch):
    seen = asked(server, monkeypatch)
    driver.get(server.url)
    wait(driver, lambda: find(driver, "model").text == "small")
    assert not find(driver, "key").is_displayed()
    driver.find_element(By.TAG_NAME, "summary").click()
    find(driver, "system").send_keys("Be brief.")
    temperature = find(driver, "temperature")
    temperature.clear()
    temperature.send_keys("0")
    say(driver, "ab")
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 2)
    assert seen[0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab"}]
    expected = "".join(server.model.generate(seen[0], max_tokens=CONTEXT, activations="exact"))
    assert kept(driver)[0]["messages"][1]["content"] == expected
    assert re.match(r"\d+ tokens", driver.find_element(By.CSS_SELECTOR, "article small").text)
    # The conversation goes on, and begins anew.
    say(driver, "b")
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 4)
    assert [message["role"] for message in seen[-1]] == ["system", "user", "assistant", "user"]
    assert seen[-1][2]["content"] == expected
    find(driver, "chats-button").click()
    find(driver, "new").click()
    assert articles(driver) == []
    say(driver, "a")
    wait(driver, lambda: len(articles(driver)) == 2)
    wait(driver, lambda: idle(driver))
    assert [message["role"] for message in seen[-1]] == ["system", "user"]


def test_chats_and_settings_are_kept_in_the_browser(driver, server):
    driver.get(server.url)
    driver.execute_script("localStorage.clear()")
    driver.get(server.url)
    driver.find_element(By.TAG_NAME, "summary").click()
    find(driver, "top_k").send_keys("1" + Pressed.TAB)
    answers_with(driver, stream_of({"content": "first"}))
    say(driver, "one")
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 2)
    find(driver, "chats-button").click()
    find(driver, "new").click()
    answers_with(driver, stream_of({"content": "second"}))
    say(driver, "two")
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 2)
    assert [chat["title"] for chat in kept(driver)] == ["two", "one"]
    driver.get(server.url)
    assert articles(driver) == []
    assert find(driver, "top_k").get_attribute("value") == "1"
    titles = "return [...document.querySelectorAll('#chats li button:first-child')].map((each) => each.textContent)"
    assert driver.execute_script(titles) == ["two", "one"]
    find(driver, "chats-button").click()
    driver.find_elements(By.CSS_SELECTOR, "#chats li button")[2].click()
    assert articles(driver) == [("user", "one"), ("assistant", "first")]
    # It goes on, and the settings are sent.
    answers_with(driver, stream_of({"content": "third"}))
    say(driver, "three")
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 4)
    sent = json.loads(driver.execute_script("return window.asked"))
    assert sent["top_k"] == 1
    assert [message["content"] for message in sent["messages"]] == ["one", "first", "three"]
    assert "temperature" not in sent
    find(driver, "chats-button").click()
    for _ in range(2):
        driver.find_elements(By.CSS_SELECTOR, "#chats li button")[1].click()
    assert kept(driver) == []


def test_an_answer_is_made_anew_and_a_question_is_edited(driver, server):
    driver.get(server.url)
    answers_with(driver, stream_of({"content": "one answer"}))
    say(driver, "a question")
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 2)
    answers_with(driver, stream_of({"content": "another"}))
    find(driver, "again").click()
    wait(driver, lambda: idle(driver) and articles(driver)[-1:] == [("assistant", "another")])
    assert articles(driver) == [("user", "a question"), ("assistant", "another")]
    assert len(json.loads(driver.execute_script("return window.asked"))["messages"]) == 1
    find(driver, "edit").click()
    assert articles(driver) == []
    assert find(driver, "prompt").get_attribute("value") == "a question"


def test_thoughts_are_folded_and_calls_get_results(driver, server):
    driver.get(server.url)
    call = {"index": 0, "id": "call1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    pieces = [{"index": 0, "function": {"arguments": text}} for text in ('{"city": ', '"Paris"}')]
    deltas = [{"reasoning_content": "Hm, "}, {"reasoning_content": "so."}, {"content": "Let me look."}]
    answers_with(driver, stream_of(*deltas, *({"tool_calls": [each]} for each in (call, *pieces))))
    tools = [{"type": "function", "function": {"name": "weather"}}]
    driver.execute_script("document.getElementById('tools').value = arguments[0]", json.dumps(tools))
    say(driver, "ab")
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 2)
    assert json.loads(driver.execute_script("return window.asked"))["tools"] == tools
    thoughts = driver.find_element(By.CSS_SELECTOR, "article .thoughts")
    assert thoughts.text == "Thoughts"
    thoughts.find_element(By.TAG_NAME, "summary").click()
    assert thoughts.text == "Thoughts\nHm, so."
    box = driver.find_element(By.CSS_SELECTOR, "article .call")
    assert "Calls weather" in box.text
    assert '{"city": "Paris"}' in box.text
    box.find_element(By.TAG_NAME, "textarea").send_keys("sun")
    answers_with(driver, stream_of({"content": "It is sunny."}))
    find(driver, "results").click()
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 3)
    _, answer, result = json.loads(driver.execute_script("return window.asked"))["messages"]
    assert result == {"role": "tool", "tool_call_id": "call1", "content": "sun"}
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    assert answer["reasoning_content"] == "Hm, so."
    driver.execute_script("document.getElementById('tools').value = 'no list'")
    say(driver, "b")
    assert "list" in find(driver, "problem").text


MARKDOWN = """# Title
A *short* **text** with `code` and https://example.com/a_b.

- one
  1. inner
- two

| a | b |
|---|---|
| 1 | 2 |

> said

```python
for i in "ab":  # twice
    pass
```
[good](https://example.com) [bad](javascript:alert`1`) [worse](data:text/html,x) 2 * 3 * 4, snake_case_name"""


def test_markdown_and_code(driver, server):
    driver.get(server.url)
    answers_with(driver, stream_of(*({"content": character} for character in MARKDOWN)))
    say(driver, "ab")
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 2)

    def texts(selector: str) -> list[str]:
        return [each.text for each in driver.find_elements(By.CSS_SELECTOR, f"article.assistant .said {selector}")]

    assert texts("h3") == ["Title"]
    assert (texts("em"), texts("strong"), texts("p > code")) == (["short"], ["text"], ["code", "1"])
    assert texts("ul > li > ol > li") == ["inner"]
    assert texts("ul > li")[1] == "two"
    assert (texts("th"), texts("td")) == (["a", "b"], ["1", "2"])
    assert texts("blockquote") == ["said"]
    assert texts("pre") == ['for i in "ab":  # twice\n    pass']
    assert (texts(".keyword"), texts(".string"), texts(".comment")) == (["for", "in", "pass"], ['"ab"'], ["# twice"])
    links = driver.find_elements(By.CSS_SELECTOR, "article.assistant a")
    assert [each.get_attribute("href") for each in links] == ["https://example.com/a_b", "https://example.com/"]
    assert {each.get_attribute("rel") for each in links} == {"noopener noreferrer nofollow"}
    assert "[bad](javascript:alert1) [worse](data:text/html,x) 2 * 3 * 4, snake_case_name" in texts("p")[-1]


def test_hostile_markdown_is_drawn(driver, server):
    """Within the browser's limit on the time of a script: where time grows with the square, it does not end."""
    driver.get(server.url)
    lines = ["`" * 30000, "*a " * 20000, "[" * 30000, "> " * 5000, "- " * 5000, "|" * 20000, "[a](" * 10000]
    script = "return blocksOf(arguments[0]).map(drawBlock).length"
    for line in [*lines, "\n".join(lines), "```js\n" + "/*" * 30000, "```py\n" + '"' * 30001]:
        assert driver.execute_script(script, line) > 0


def kept(driver: object) -> list[dict[str, object]]:
    """The chats in the browser's storage."""
    return json.loads(driver.execute_script("return localStorage.getItem('billfish.chats') ?? '[]'"))


def stream_of(*deltas: dict[str, object]) -> str:
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    return "".join(f"data: {each}\n\n" for each in [*events, "[DONE]"])


def answers_with(driver: object, body: str) -> None:
    """The page's requests for chats get this answer, and are kept in `asked`."""
    driver.execute_script(
        """window.fetch = async (url, options) => {
          if (String(url).includes("chat")) window.asked = options.body;
          return new Response(arguments0);
        };""".replace("arguments0", json.dumps(body))
    )


def test_stop_cancels_the_answer(driver, server, monkeypatch):
    monkeypatch.setattr(server.model.tokenizer, "ends", set())  # it would go on for a while
    choose = server.model.decoder.choose

    def slowly(*arguments):
        time.sleep(0.1)  # so that the click comes before the end
        return choose(*arguments)

    monkeypatch.setattr(server.model.decoder, "choose", slowly)
    driver.get(server.url)
    # Frames that are longer than a token: one is asked for and not yet drawn when the click comes.
    driver.execute_script(
        f"requestAnimationFrame = (draw) => setTimeout(draw, {1000 * FRAME}); cancelAnimationFrame = clearTimeout"
    )
    say(driver, "ab")
    wait(driver, lambda: len(articles(driver)) == 2 and articles(driver)[1][1] != "")
    time.sleep(0.15)  # another token
    find(driver, "stop").click()
    wait(driver, lambda: idle(driver))
    time.sleep(1.5 * FRAME)
    wait(driver, lambda: server.engine.counts().running == 0)
    assert server.engine.counts().finished["cancelled"] == 1
    rate = driver.find_element(By.CSS_SELECTOR, "article small").text
    assert re.fullmatch(r"\d+ tokens, [\d.]+ tokens/s \(stopped\)", rate)


def test_a_key_is_asked_for_where_the_server_wants_one(driver, model):
    with serving(model, keys=["secret"], streams=1) as server:
        driver.get(server.url)
        wait(driver, lambda: find(driver, "key").is_displayed())
        assert "API key" in find(driver, "problem").text
        find(driver, "key").send_keys("secret" + Pressed.TAB)
        wait(driver, lambda: find(driver, "model").text == "small")
        assert not find(driver, "problem").is_displayed()
        say(driver, "ab")
        wait(driver, lambda: idle(driver) and len(articles(driver)) == 2)


def test_what_is_wrong_is_told_and_what_was_written_stays(driver, server):
    driver.get(server.url)
    wait(driver, lambda: find(driver, "model").text == "small")
    text = "b" * (CONTEXT + 1)
    driver.execute_script("document.getElementById('prompt').value = arguments[0]", text)
    find(driver, "send").click()
    wait(driver, lambda: "the context" in find(driver, "problem").text)
    assert articles(driver) == []
    assert find(driver, "prompt").get_attribute("value") == text


@pytest.mark.promise("server", "the chat page never renders a model's text as HTML")
def test_texts_are_never_html(driver, server):
    driver.get(server.url)
    wait(driver, lambda: find(driver, "model").text == "small")
    event = json.dumps({"choices": [{"delta": {"content": ATTACK}}]})
    driver.execute_script(
        """const body = `data: ${arguments[0]}\\n\\ndata: [DONE]\\n\\n`;
        window.fetch = async () => new Response(body);""",
        event,
    )
    say(driver, ATTACK)
    wait(driver, lambda: idle(driver) and len(articles(driver)) == 2)
    assert articles(driver) == [("user", ATTACK), ("assistant", ATTACK)]
    assert driver.title == "small"
    # Where a text did become HTML, the policy would still not run it.
    driver.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", ATTACK)
    script = (
        "const made = document.createElement('script'); made.text = 'document.title = 1'; document.body.append(made)"
    )
    driver.execute_script(script)
    assert driver.title == "small"


def test_it_fits_a_phone_in_light_and_dark(driver, server):
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get(server.url)
        wait(driver, lambda: find(driver, "model").text == "small")
        wide, seen = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= seen
        ratio = driver.execute_script(CONTRAST)
        assert ratio >= 7, scheme
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


CONTRAST = """
const style = getComputedStyle(document.body);
const light = (color) => {
  const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const [a, b] = [light(style.color), light(style.backgroundColor)].sort();
return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
"""


def test_nothing_comes_from_outside(driver, server):
    driver.get(server.url)
    wait(driver, lambda: find(driver, "model").text == "small")
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    hosts = {urlsplit(url).hostname for url in urls if url.startswith("http")}  # the browser has pages of its own
    assert hosts == {"127.0.0.1"}
    assert not re.search(r"https?://", Path(FILE).read_text())


def test_the_policy_names_the_page_s_own_script_alone(server):
    with urllib.request.urlopen(server.url + "/") as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
