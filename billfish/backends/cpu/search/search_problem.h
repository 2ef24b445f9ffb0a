// What the search for scales is given: the words of billfish/core/search.py and billfish/core/elements.py.
#pragma once
#include <cstdint>

namespace billfish {

// How a code becomes a number, and the way back. The kinds are the classes of elements.py.
struct SearchElement {
  enum Kind : int32_t { even, e2m1, e4m3, cells, sorted };
  Kind kind;
  int32_t bits;
  float low, high, bias;        // even: the code is value + bias, in so many bits
  int32_t cell_count;           // cells, sorted: the x of each cell have one nearest number, or two with a middle between them
  float first_cell, per_unit;   // floor(x * per_unit) - first_cell is the cell of x
  const uint8_t* code_of_cell;  // [cell_count]
  const float* of_cell;         // [cell_count]: cells: the nearest number; sorted: the middle
  float values[256];            // of each code
};

// Numbers that a format can store, one for each group: the nearest to x. The kinds are the rules of search.py.
struct SearchRule {
  enum Kind : int32_t { any, f16, e4m3, integer, at_most_zero, zero_integer, zero_f16 };
  Kind kind;
  const float* upper;  // integer: an integer from low to high times upper[row]
  float low, high;     // zero_integer, too: a zero point from 0 to high
  float factor;        // e4m3: times this
};

// A scale, and perhaps a minimum, for each row of w [rows, length].
struct ScaleSearch {
  SearchElement element;
  int64_t rows, length;
  const float *w, *importance;   // [rows, length]; no importance is null
  const float *scale, *minimum;  // [rows]: what to start with
  SearchRule scale_rule, minimum_rule;
  bool thorough;
  const float *factors, *further;  // of the grid, and of what is tried for the weighted error only
  int64_t factor_count, further_count;
  float *plain_scale, *plain_minimum;        // [rows]: of least squared error, if the search is thorough
  float *weighted_scale, *weighted_minimum;  // [rows]: of least weighted error, if there is an importance
};

// How codes of numbers in the middle of two values are chosen. `even`: the element's own rule.
enum class Ties : int32_t { even, up, away, toward_zero };

// Codes [rows, length] of (w - minimum) / scale + zero; minimum and zero may be null.
struct Encoding {
  SearchElement element;
  Ties ties;
  int64_t rows, length;
  const float *w, *scale, *minimum, *zero;
  uint8_t* codes;
};

// The error [rows] that codes leave, in float64. Each row has ceil(length / group) scales, zeros and minimums; the latter two may be null.
struct ErrorOfCodes {
  const float* values;  // [256]
  int64_t rows, length, group;
  const float *w, *importance;
  const uint8_t* codes;
  const float *scale, *zero, *minimum;
  double* error;
};

// Of one ISA level. `room` is for 2 * (length + 16) floats. Rows [first, last).
struct SearchKernels {
  void (*search)(const ScaleSearch& problem, int64_t first, int64_t last, float* room);
  void (*encode)(const Encoding& encoding, int64_t first, int64_t last);
  void (*error)(const ErrorOfCodes& codes, int64_t first, int64_t last);
  // Of each row the least and the greatest number, and that of largest magnitude; of equal ones the first.
  void (*extremes)(const float* w, int64_t rows, int64_t length, float* least, float* greatest);
  void (*signed_extreme)(const float* w, int64_t rows, int64_t length, float* largest);
  // Sums of a * b in lanes, as search.py has them.
  void (*dot)(const float* a, const float* b, int64_t rows, int64_t length, float* out);
};

}  // namespace billfish
