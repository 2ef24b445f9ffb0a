// Rows that are sampled late: their logits change first, or their log probabilities are wanted. late_rows.py has the same structures.
#pragma once
#include "device.cuh"

// A logit that was seen is multiplied by a factor of the row; then it loses `minus` and gains `plus`.
struct Adjustment {
  int token, seen;
  float minus, plus;
};
struct LateRow {
  const Adjustment* adjustments;  // `count` of them, each of another token
  const u32* mask;                // a bit for each token that may come next; null: all may
  int count, row;                 // the row of all logits
  float above, below;             // factors of logits above 0, and of others
  int alternatives, unused;       // so many of the best tokens are wanted; -1: no log probabilities
};
