"""Whole checkpoints: calibration, GPTQ, and formats chosen for a number of bits."""
