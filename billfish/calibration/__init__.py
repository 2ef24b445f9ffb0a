"""Calibration: what the weights of a model are multiplied with, so that quantizing can mind it.

statistics   sums over the inputs of each matrix
sums         how they are added up
running      a text through a language model, layer by layer
hooks        batches through any model of torch
file         our files; imatrix: llama.cpp's
text         the text, and the one that the package carries
"""

from billfish.calibration.statistics import InputStatistics, Statistics

__all__ = ["InputStatistics", "Statistics"]
