"""Real clients, each with the calls that its users make: chat, streams, tools, structured output, embeddings.

`run.py` runs them in an environment of their own, one process for each. A scenario fails by raising. Answers of a small
model may say anything, so that only their shape is checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

URL, MODEL = os.environ.get("CLIENT_URL", ""), os.environ.get("CLIENT_MODEL", "")
V1 = f"{URL}/v1"
ASKED = "Which city is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}}


def weather(city: str, days: int) -> str:
    """Tell the weather.

    Args:
        city: the name of a city
        days: from now
    """
    return f"sun in {city} for {days} days"


def openai() -> None:
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        large: bool

    with OpenAI(base_url=V1, api_key="none", max_retries=0) as client:
        asked = [{"role": "user", "content": ASKED}]
        whole = client.chat.completions.create(model=MODEL, messages=asked, max_tokens=8, user="me", store=True)
        assert whole.choices[0].message.content
        chunks = list(client.chat.completions.create(model=MODEL, messages=asked, max_tokens=8, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        parsed = client.chat.completions.parse(model=MODEL, messages=asked, response_format=City, max_tokens=60)
        assert isinstance(parsed.choices[0].message.parsed.large, bool)
        strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
        with client.chat.completions.stream(
            model=MODEL,
            messages=asked,
            tools=[strict],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=80,
        ) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["days"] in (1, 2, 3)
        response = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=8)
        again = client.responses.create(
            model=MODEL, input="And of Spain?", previous_response_id=response.id, max_output_tokens=8, stream=True
        )
        assert [event.type for event in again][-1] in ("response.completed", "response.incomplete")
        parsed = client.responses.parse(model=MODEL, input=ASKED, text_format=City, max_output_tokens=60)
        assert isinstance(parsed.output_parsed, City)
        tool = {"type": "function", **WEATHER["function"], "strict": True}
        called = client.responses.create(model=MODEL, input=ASKED, tools=[tool], tool_choice="required")
        assert called.output[0].type == "function_call"
        assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2
        done = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, logprobs=2, echo=True)
        assert done.choices[0].logprobs.token_logprobs[0] is None
        assert client.models.list().data


def anthropic() -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=URL, api_key="none", max_retries=0)
    asked: Any = [{"role": "user", "content": ASKED}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(model="claude-x", max_tokens=8, messages=asked, system=system)
    assert whole.content[0].type == "text"
    with client.messages.stream(model=MODEL, max_tokens=8, messages=asked) as stream:
        assert "".join(stream.text_stream)
    tool = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
    with client.messages.stream(
        model=MODEL, max_tokens=80, messages=asked, tools=[tool], tool_choice={"type": "tool", "name": "weather"}
    ) as stream:
        final = stream.get_final_message()
    (use,) = (block for block in final.content if block.type == "tool_use")
    assert use.input["days"] in (1, 2, 3)
    assert final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sun"}]}
    said = [*asked, {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=said, tools=[tool]).usage.output_tokens
    assert client.messages.count_tokens(model=MODEL, messages=asked).input_tokens > 5


def ollama() -> None:
    from ollama import Client

    client = Client(host=URL)
    asked = [{"role": "user", "content": ASKED}]
    short = {"num_predict": 8, "temperature": 0}
    assert client.chat(model=MODEL, messages=asked, options=short).message.content
    assert "".join(
        part.message.content for part in client.chat(model=MODEL, messages=asked, options=short, stream=True)
    )
    made = client.chat(model=MODEL, messages=asked, format=SCHEMA, options={"num_predict": 60})
    assert json.loads(made.message.content)["days"] in (1, 2, 3)
    client.chat(model=MODEL, messages=asked, tools=[weather], options=short, think=False)
    assert client.generate(model=MODEL, prompt=ASKED, options=short).done
    assert len(client.embed(model=MODEL, input=["a", "b"]).embeddings) == 2
    assert client.list().models[0].model == MODEL
    assert client.show(MODEL).capabilities


def litellm() -> None:
    import litellm as client

    options = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": "none", "max_tokens": 8}
    asked = [{"role": "user", "content": ASKED}]
    whole = client.completion(messages=asked, **options)
    assert whole.choices[0].message.content
    assert "".join(
        part.choices[0].delta.content or "" for part in client.completion(messages=asked, stream=True, **options)
    )
    called = client.completion(
        messages=asked, tools=[WEATHER], tool_choice="required", **{**options, "max_tokens": 200}
    )
    message = called.choices[0].message
    said = [*asked, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}]
    assert client.completion(messages=said, tools=[WEATHER], **options).choices
    assert client.embedding(f"openai/{MODEL}", input=["a"], api_base=V1, api_key="none").data
    options = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 8}
    assert client.completion(messages=asked, **options).choices[0].message.content
    options = {"model": f"ollama_chat/{MODEL}", "api_base": URL, "max_tokens": 8}
    assert client.completion(messages=asked, **options).choices[0].message.content


def langchain_openai() -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from pydantic import BaseModel

    class City(BaseModel):
        """A city."""

        name: str
        large: bool

    model = ChatOpenAI(base_url=V1, api_key="none", model=MODEL, max_tokens=8, max_retries=0)
    assert model.invoke(ASKED).content
    assert "".join(part.content for part in model.stream(ASKED))
    longer = ChatOpenAI(base_url=V1, api_key="none", model=MODEL, max_tokens=200, max_retries=0)
    for method in ("json_schema", "function_calling"):
        assert isinstance(longer.with_structured_output(City, method=method).invoke(ASKED), City)
    assert longer.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(ASKED).tool_calls
    response = ChatOpenAI(base_url=V1, api_key="none", model=MODEL, max_tokens=8, use_responses_api=True)
    assert response.invoke(ASKED).content
    vectors = OpenAIEmbeddings(base_url=V1, api_key="none", model=MODEL, check_embedding_ctx_length=False)
    assert len(vectors.embed_documents(["a", "b"])) == 2


def langchain_anthropic() -> None:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_tokens=8, max_retries=0)
    assert model.invoke(ASKED).content
    assert list(model.stream(ASKED))
    longer = ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_tokens=200, max_retries=0)
    assert longer.bind_tools([weather], tool_choice="any").invoke(ASKED).tool_calls


def langchain_ollama() -> None:
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    model = ChatOllama(base_url=URL, model=MODEL, num_predict=8)
    assert model.invoke(ASKED).content
    assert "".join(part.content for part in model.stream(ASKED))
    model.bind_tools([weather]).invoke(ASKED)
    assert len(OllamaEmbeddings(base_url=URL, model=MODEL).embed_query("a")) > 10


def llama_index() -> None:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        api_base=V1, api_key="none", model=MODEL, max_tokens=8, is_chat_model=True, is_function_calling_model=True
    )
    asked = [ChatMessage(role="user", content=ASKED)]
    assert model.chat(asked).message.content
    assert [part.delta for part in model.stream_chat(asked)]
    assert OpenAILike(api_base=V1, api_key="none", model=MODEL, max_tokens=4).complete("One, two,").text
    assert len(OpenAILikeEmbedding(api_base=V1, api_key="none", model_name=MODEL).get_text_embedding("a")) > 10


def pydantic_ai() -> None:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel):
        name: str
        large: bool

    by_anthropic = AnthropicProvider(base_url=URL, api_key="none")
    provider = OpenAIProvider(base_url=V1, api_key="none")
    for model in (
        OpenAIChatModel(MODEL, provider=provider),
        OpenAIResponsesModel(MODEL, provider=provider),
        AnthropicModel(MODEL, provider=by_anthropic),
    ):
        assert Agent(model, model_settings={"max_tokens": 8}).run_sync(ASKED).output
        made = Agent(model, output_type=City, model_settings={"max_tokens": 200}, retries=3).run_sync(ASKED).output
        assert isinstance(made, City)


def instructor() -> None:
    import instructor as library
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        large: bool

    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(OpenAI(base_url=V1, api_key="none", max_retries=0), mode=mode)
        asked = [{"role": "user", "content": ASKED}]
        made = client.chat.completions.create(model=MODEL, response_model=City, messages=asked, max_tokens=200)
        assert isinstance(made, City)


def openai_agents() -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=V1, api_key="none", max_retries=0)
    tool = function_tool(weather)

    async def run() -> None:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind(model=MODEL, openai_client=client)
            agent = Agent("a", instructions="Be brief.", model=model, model_settings=ModelSettings(max_tokens=8))
            assert (await Runner.run(agent, ASKED)).final_output is not None
            forced = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
            agent = Agent("a", model=model, tools=[tool], model_settings=forced, tool_use_behavior="stop_on_first_tool")
            assert "sun" in str((await Runner.run(agent, ASKED)).final_output)

    asyncio.run(run())


def smolagents() -> None:
    from smolagents import OpenAIServerModel, Tool

    class Weather(Tool):
        name = "weather"
        description = "The weather"
        inputs = {"city": {"type": "string", "description": "a city"}}
        output_type = "string"

        def forward(self, city: str) -> str:
            return "sun"

    model = OpenAIServerModel(model_id=MODEL, api_base=V1, api_key="none", max_tokens=100)
    asked = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]
    assert model.generate(asked, max_tokens=8).content
    assert list(model.generate_stream(asked, max_tokens=8))
    assert model.generate(asked, tools_to_call_from=[Weather()]).tool_calls


def dspy() -> None:
    import dspy as library

    class KnownModel(library.LM):  # dspy asks litellm what a model can, and that knows some names
        supports_response_schema = True
        supported_params = frozenset({"response_format", "max_tokens", "temperature"})

    model = KnownModel(f"openai/{MODEL}", api_base=V1, api_key="none", max_tokens=60, cache=False)
    assert model(ASKED)
    (made,) = model(ASKED, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})
    assert "days" in str(made)
    # A signature, whose fields become a schema.
    library.configure(lm=model, adapter=library.JSONAdapter())
    found = library.Predict("question -> city: str, large: bool", max_tokens=200)(question=ASKED)
    assert isinstance(found.large, bool)


def haystack() -> None:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    key = Secret.from_token("none")
    chat = OpenAIChatGenerator(api_key=key, model=MODEL, api_base_url=V1, generation_kwargs={"max_tokens": 8})
    assert chat.run([ChatMessage.from_user(ASKED)])["replies"]
    assert OpenAITextEmbedder(api_key=key, model=MODEL, api_base_url=V1).run("a")["embedding"]


def autogen() -> None:
    from autogen_core.models import ModelFamily, UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    about = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": ModelFamily.UNKNOWN,
    }

    async def run() -> None:
        client = OpenAIChatCompletionClient(model=MODEL, base_url=V1, api_key="none", model_info=about, max_tokens=8)
        asked = [UserMessage(content=ASKED, source="user")]
        assert (await client.create(asked)).content
        assert [part async for part in client.create_stream(asked)]
        tool = FunctionTool(weather, description="The weather", strict=True)
        longer = {"max_tokens": 200}
        made = await client.create(asked, tools=[tool], tool_choice="required", extra_create_args=longer)
        assert made.content[0].name == "weather"

    asyncio.run(run())


def agno() -> None:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id=MODEL, base_url=V1, api_key="none", max_tokens=8)
    assert Agent(model=model, telemetry=False).run(ASKED).content
    assert list(Agent(model=model, telemetry=False).run(ASKED, stream=True))
    Agent(model=model, tools=[weather], telemetry=False).run(ASKED)


def semantic_kernel() -> None:
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
    from semantic_kernel.connectors.ai.open_ai import (
        OpenAIChatCompletion,
        OpenAIChatPromptExecutionSettings,
        OpenAITextEmbedding,
    )
    from semantic_kernel.contents import ChatHistory
    from semantic_kernel.functions import kernel_function
    from semantic_kernel.kernel import Kernel

    class Tools:
        @kernel_function(name="weather", description="The weather")
        def weather(self, city: str) -> str:
            return f"sun in {city}"

    async def run() -> None:
        client = AsyncOpenAI(base_url=V1, api_key="none", max_retries=0)
        service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
        history = ChatHistory()
        history.add_user_message(ASKED)
        short = OpenAIChatPromptExecutionSettings(max_tokens=8)
        assert (await service.get_chat_message_contents(history, short))[0].content
        assert [part async for part in service.get_streaming_chat_message_contents(history, short)]
        kernel = Kernel()
        kernel.add_plugin(Tools(), "tools")
        forced = FunctionChoiceBehavior.Required(auto_invoke=False)
        settings = OpenAIChatPromptExecutionSettings(max_tokens=200, function_choice_behavior=forced)
        (said,) = await service.get_chat_message_contents(history, settings, kernel=kernel)
        assert said.items[0].function_name == "weather"
        embedding = OpenAITextEmbedding(ai_model_id=MODEL, async_client=client)
        assert len(await embedding.generate_embeddings(["a", "b"])) == 2

    asyncio.run(run())


def llm_command() -> None:
    """The command `llm` of Simon Willison."""
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        entry = f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {V1}\n  supports_schema: true\n"
        pathlib.Path(folder, "extra-openai-models.yaml").write_text(entry)
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "llm", "-m", "ours", "-o", "max_tokens", "8"]
        said = subprocess.run([*command, ASKED], env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.strip()
        command = [sys.executable, "-m", "llm", "-m", "ours", "--schema", "city, large bool", ASKED]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert set(json.loads(said.stdout)) == {"city", "large"}, said.stdout


CLIENTS = {
    "openai": openai,
    "anthropic": anthropic,
    "ollama": ollama,
    "litellm": litellm,
    "langchain-openai": langchain_openai,
    "langchain-anthropic": langchain_anthropic,
    "langchain-ollama": langchain_ollama,
    "llama-index-llms-openai-like": llama_index,
    "pydantic-ai-slim": pydantic_ai,
    "instructor": instructor,
    "openai-agents": openai_agents,
    "smolagents": smolagents,
    "dspy": dspy,
    "haystack-ai": haystack,
    "autogen-ext": autogen,
    "agno": agno,
    "semantic-kernel": semantic_kernel,
    "llm": llm_command,
}

if __name__ == "__main__":
    CLIENTS[sys.argv[1]]()
