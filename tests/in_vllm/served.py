"""Tokens from vLLM: python served.py CASES, in an environment with vLLM. `run.py` calls it.

CASES: JSON, [[arguments of vllm.LLM, prompts in tokens, how many tokens to add], ...]. Prints a line "tokens JSON" for
each case.
"""

from __future__ import annotations

import gc
import json
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else two ranks need two NUMA nodes
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process; ranks are processes of their own


def main() -> None:
    from vllm import LLM, SamplingParams

    for arguments, prompts, count in json.loads(sys.argv[1]):
        llm = LLM(skip_tokenizer_init=True, dtype="float32", **arguments)
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        print("tokens", json.dumps([list(answer.outputs[0].token_ids) for answer in answers]), flush=True)
        del llm
        gc.collect()


if __name__ == "__main__":  # vLLM's ranks import this file
    main()
