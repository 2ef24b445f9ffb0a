"""Benchmarks: run each as a module, such as `python -m benchmarks.llm_speed`."""
