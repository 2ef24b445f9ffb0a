"""Chat templates in small: how the families of docs/models.md write turns, thoughts and calls of functions.

Each has the marks, the white space and the conditions of the published template, without its instructions.
"""

from __future__ import annotations

TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
JSON_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
CHATML = (
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{{ '<tool_response>\n' + message.content + '\n</tool_response>' if message.role == 'tool' else '' }}"
    "__THOUGHT__{{ message.content if message.role != 'tool' else '' }}__CALLS__<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n__PROMPT__{% endif %}"
)
LAST_THOUGHT = (
    "{% if message.role == 'assistant' and loop.last and message.reasoning_content %}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
)
EMPTY_THOUGHT = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
HERMES_CALLS = (
    "{% for call in message.tool_calls %}{{ '\n' if message.content or not loop.first }}<tool_call>\n"
    + JSON_CALL
    + "\n</tool_call>{% endfor %}"
)
XML_CALLS = (
    "{% for call in message.tool_calls %}{{ '\n' if message.content or not loop.first }}<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)


def chatml(calls: str, thought: str = "", prompt: str = "") -> str:
    """Turns between <|im_start|> and <|im_end|>."""
    written = CHATML.replace("__CALLS__", "{% if message.tool_calls %}" + calls + "{% endif %}")
    return TOOLS + written.replace("__THOUGHT__", thought).replace("__PROMPT__", prompt)


def of_roles(assistant: str, prompt: str, head: str = TOOLS, user: str = "<|user|>\n{{ m.content }}") -> str:
    """A template of its own text for each role."""
    return (
        head + "{% for m in messages %}{% if m.role == 'assistant' %}" + assistant + "{% elif m.role == 'tool' %}"
        "<|observation|>{{ m.content }}{% else %}" + user + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )


TEMPLATES = {
    "qwen2.5": chatml(HERMES_CALLS),
    "qwen3": chatml(HERMES_CALLS, LAST_THOUGHT, EMPTY_THOUGHT),
    "qwen3-thinking": chatml(HERMES_CALLS, LAST_THOUGHT, "<think>\n"),
    "qwen3-coder": chatml(XML_CALLS),
    "qwen3.5": chatml(XML_CALLS, LAST_THOUGHT, EMPTY_THOUGHT or "<think>\n"),
    "smollm2": chatml("").replace(TOOLS, ""),
    "granite4": of_roles(
        "<|start_of_role|>assistant<|end_of_role|>{{ m.content }}{% for call in m.tool_calls %}{{ '\n' if not "
        "loop.first }}<tool_call>\n" + JSON_CALL + "\n</tool_call>{% endfor %}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "granite3": "respond only with <|tool_call|> and a list. {% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    "llama3": of_roles(
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{% set call = m.tool_calls[0] %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}<|eot_id|>'
        "{% else %}<|start_header_id|>assistant<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endif %}",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral-nemo": of_roles(
        "{% if m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": '
        '"{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}',
        "",
        user="[INST]{{ m.content }}[/INST]",
    ),
    "mistral-small": of_roles(
        "{{ m.content or '' }}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}"
        "[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>",
        "",
        user="[INST]{{ m.content }}[/INST]",
    ),
    "ministral-3-reasoning": of_roles(
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
        "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}"
        "[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>",
        "",
        user="[INST]{{ m.content }}[/INST]",
    ),
    "glm4.6": of_roles(
        "<|assistant|>{% if m.reasoning_content %}\n<think>{{ m.reasoning_content }}</think>{% else %}"
        "\n<think></think>{% endif %}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
        "{% for call in m.tool_calls %}\n<tool_call>{{ call.function.name }}\n"
        "{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"
        "</tool_call>{% endfor %}",
        "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}",
    ),
    "minimax-m2": of_roles(
        "]~b]ai\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for call in m.tool_calls %}"
        '<invoke name="{{ call.function.name }}">\n{% for key, value in call.function.arguments | items %}'
        '<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}'
        "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n",
        "]~b]ai\n<think>\n",
        user="]~b]user\n{{ m.content }}[e~[\n",
    ),
    "seed-oss": of_roles(
        "<seed:bos>assistant{% if m.reasoning_content %}\n<seed:think>{{ m.reasoning_content }}</seed:think>"
        "{% endif %}{% if m.content %}{{ '\n' + m.content }}{% endif %}{% for call in m.tool_calls %}"
        "\n<seed:tool_call>\n<function={{ call.function.name }}>\n"
        "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>\n"
        "{% endfor %}</function>\n</seed:tool_call>{% endfor %}<seed:eos>",
        "<seed:bos>assistant\n",
        user="<seed:bos>user\n{{ m.content }}<seed:eos>",
    ),
    "lfm2": "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "lfm2.5": chatml(
        "<|tool_call_start|>[{% for call in message.tool_calls %}{{ call.function.name }}("
        "{% for key, value in call.function.arguments | items %}{{ key }}="
        "{% if value is string %}'{{ value }}'{% elif value is mapping %}{{ value | tojson }}"
        "{% else %}{{ value | string }}{% endif %}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>",
        "{% generation %}{% if message.thinking is defined %}<think>{{ message.thinking }}</think>{% endif %}"
        "{% endgeneration %}",
    ),
    "gemma3": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('roles') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "gemma4": '{% macro value_of(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is boolean %}'
    "{{ 'true' if v else 'false' }}{% elif v is sequence %}[{% for x in v %}{{ value_of(x) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    + of_roles(
        "<|turn>model\n{% if m.reasoning and m.tool_calls %}<|channel>thought\n{{ m.reasoning }}\n<channel|>{% endif %}"
        "{% for call in m.tool_calls %}<|tool_call>call:{{ call.function.name }}{{ '{' }}"
        "{% for key, value in call.function.arguments | dictsort %}{{ key }}:{{ value_of(value) }}"
        "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}{{ m.content }}"
        "{% if m.tool_calls %}<|tool_response>{% else %}<turn|>\n{% endif %}",
        "<|turn>model\n{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}",
        user="<|turn>user\n{{ m.content }}<turn|>\n",
    ),
    "gpt-oss": of_roles(
        "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{% if m.thinking %}<|start|>assistant<|channel|>"
        "analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=functions.{{ call.name }}"
        "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>{% else %}<|start|>assistant"
        "<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}",
        "<|start|>assistant",
        user="<|start|>user<|message|>{{ m.content }}<|end|>",
    ),
}
