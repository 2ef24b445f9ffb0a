// Mixture of experts: grouped GEMM of a stack of matrices with the rows of x that chose each of them.
//
// Rows are sorted by expert, so that each expert's rows are multiplied together, and the tiles of all active experts are distributed
// over the threads in one loop. Experts without rows are not read. No result depends on the number of threads.
#pragma once
#include <functional>

#include "layout/problem.h"

namespace billfish {

// The matrices W [experts, n, k] of one kind. Each is padded to whole tiles by itself.
struct ExpertStack {
  Weights weights;  // of the first expert
  int64_t experts;
  size_t stride;         // bytes of the stream from one expert to the next
  const float* factors;  // [experts], or null where all have weights.factor
  const float* biases;   // [experts, n], or null

  Weights of(int64_t expert) const {
    Weights own = weights;
    own.stream += size_t(expert) * stride;
    if (factors) own.factor = factors[expert];
    return own;
  }
  const float* bias_of(int64_t expert) const { return biases ? biases + expert * weights.n : nullptr; }
};

// Bytes of one expert of a stack.
inline size_t expert_bytes(const Level& level, const Weights& w) {
  const TileShape shape(w, level.tile_rows);
  return shape.tile_bytes * size_t((w.n + shape.rows - 1) / shape.rows);
}

// y [tokens, chosen, n]: y[t, j] = W[ids[t, j]] x[t] + its bias; ids [tokens, chosen] are below the number of experts.
// x [tokens, k], or [tokens, chosen, k] if `each_its_own`. digits: 0 for exact, 1 for q8, 2 for q16.
void multiply_experts(const Level& level, const float* x, bool each_its_own, int64_t tokens, const int32_t* ids, int64_t chosen,
                      const ExpertStack& stack, int digits, float* y);

// Gets the rows that chose an expert, in the order of tokens, on the thread that runs the experts: x [count, hidden] of gate and up, and
// h [count, k of down] of down, as float32 numbers, before they are rounded.
using ObserveExpert = std::function<void(int64_t expert, int64_t count, const float* x, const float* h)>;

// The gated feed-forward part: y [tokens, hidden], y[t] = sum over j of routing[t, j] (down[e] h + its bias), with e = ids[t, j] and h [k of
// down] what `activation`, one of Gate, makes of the gate and up rows of expert e times x[t] [hidden]. The sum goes in the order of j.
// up: or null where `gate` has the rows of both, all gate rows first. `observe` may be null.
void run_experts(const Level& level, const float* x, int64_t tokens, const int32_t* ids, const float* routing, int64_t chosen,
                 const ExpertStack& gate, const ExpertStack* up, const ExpertStack& down, int activation, int digits, float* y,
                 const ObserveExpert& observe = nullptr);

// Bytes that this thread keeps of the room that calls took.
size_t kept_by_experts();

}  // namespace billfish
