"""Runs in the environment of lm-evaluation-harness: its own `hf` class and its two clients of OpenAI's API, on the same
weights. `run.py` starts it. Ends with 1 unless the numbers agree.

python compare.py FOLDER URL MODEL TASKS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads wait for each other where others want the cores

CAPITALS = {
    "France": ("Paris", "Rome", "Oslo"),
    "Italy": ("Madrid", "Rome", "Vienna"),
    "Spain": ("Lisbon", "Berlin", "Madrid"),
    "Germany": ("Berlin", "Bonn", "Munich"),
    "Japan": ("Kyoto", "Tokyo", "Osaka"),
    "Egypt": ("Cairo", "Alexandria", "Giza"),
}
ANSWERS = (0, 1, 2, 0, 1, 0)
CHOICE = """
task: capitals_choice
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: choices
doc_to_target: answer
"""
GENERATE = """
task: capitals_generate
output_type: generate_until
doc_to_text: "Question: What is the capital of {{country}}?\\nAnswer:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false, temperature: 0}
metric_list:
  - metric: exact_match
"""
CHAT = GENERATE.replace("capitals_generate", "capitals_chat")
NOISE = 0.05  # of a choice's log probability; both compute in float32, in another order


def write_tasks(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"country": country, "choices": choices, "answer": answer}
        for (country, choices), answer in zip(CAPITALS.items(), ANSWERS, strict=True)
    ]
    (folder / "capitals.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'capitals.jsonl'}}}}}\ntest_split: test\n"
    )
    for name, text in (("choice", CHOICE), ("generate", GENERATE), ("chat", CHAT)):
        (folder / f"{name}.yaml").write_text(data + text)


def evaluated(model: str, arguments: dict[str, Any], tasks: list[str], folder: Path, *, chat: bool = False) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = {"tasks": tasks, "task_manager": manager, "log_samples": True, "bootstrap_iters": 0}
    return simple_evaluate(model, model_args=arguments, apply_chat_template=chat, **options)


def main() -> int:
    weights, url, name, folder = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
    write_tasks(folder)
    ours = {
        "model": name,
        "tokenizer": weights,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 1,
        "max_retries": 1,
    }
    local = {"pretrained": weights, "device": "cpu", "dtype": "float32"}
    two = ["capitals_choice", "capitals_generate"]
    expected = evaluated("hf", local, two, folder)
    found = evaluated("local-completions", {**ours, "base_url": f"{url}/v1/completions"}, two, folder)
    expected_chat = evaluated("hf", local, ["capitals_chat"], folder, chat=True)
    chats = {**ours, "base_url": f"{url}/v1/chat/completions"}
    found_chat = evaluated("local-chat-completions", chats, ["capitals_chat"], folder, chat=True)

    problems = list[str]()
    for task, one, other in (
        ("capitals_choice", expected, found),
        ("capitals_generate", expected, found),
        ("capitals_chat", expected_chat, found_chat),
    ):
        numbers = [
            {key.partition(",")[0]: value for key, value in each["results"][task].items() if isinstance(value, float)}
            for each in (one, other)
        ]
        print(f"{task}: hf {numbers[0]}, billfish {numbers[1]}")
        if numbers[0] != numbers[1]:
            problems.append(f"{task}: other numbers")
        for mine, theirs in zip(*(each["samples"][task] for each in (one, other)), strict=True):
            given, wanted = theirs["filtered_resps"], mine["filtered_resps"]
            if task != "capitals_choice" and given != wanted:
                problems.append(f"{task}: {given} instead of {wanted}")
        if task == "capitals_choice":
            logs = [
                [float(log) for sample in each["samples"][task] for log, _ in sample["filtered_resps"]]
                for each in (one, other)
            ]
            largest = max(abs(a - b) for a, b in zip(*logs, strict=True))
            print(f"{task}: {len(logs[0])} log probabilities differ by at most {largest:.1e}")
            if largest > NOISE:
                problems.append(f"{task}: log probabilities differ by {largest}")
    print("\n".join(problems) or "lm-evaluation-harness: the numbers agree")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
