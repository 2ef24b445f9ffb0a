"""What the weights of a model are multiplied with, so that quantizing can weight errors by it.

inputs            sums over the inputs of one matrix
statistics        those of all matrices of a model, by name
statistics_file   our files of them
imatrix           llama.cpp's files
"""

from billfish.statistics.inputs import InputStatistics
from billfish.statistics.statistics import Statistics

__all__ = ["InputStatistics", "Statistics"]
