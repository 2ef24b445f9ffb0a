"""Calibration: what the weights of a model are multiplied with, so that quantizing can mind it.

inputs       sums over the inputs of one matrix
statistics   those of all matrices of a model, by name
sums         how they are added up
running      a text through a language model, layer by layer
hooks        batches through any model of torch
file         our files; imatrix: llama.cpp's
text         the text, and the one that the package carries
damage       what a format costs a model; bits: a format for each matrix; spending: `quantize --bits`
"""

from billfish.statistics.inputs import InputStatistics
from billfish.statistics.statistics import Statistics

__all__ = ["InputStatistics", "Statistics"]
