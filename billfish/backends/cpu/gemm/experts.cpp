#include "gemm/experts.h"

#include <deque>
#include <vector>

#include "activations/rows.h"

namespace billfish {
namespace {

// Fewer numbers than this are made sooner by one thread than handed to others.
constexpr int64_t FEW_NUMBERS = 4096;

void share_out(int64_t count, int64_t numbers, const std::function<void(int64_t, int64_t)>& body) {
  if (numbers > FEW_NUMBERS) parallel_for(count, body);
  else if (count > 0) body(0, count);
}

// The rows of one chosen expert: rows [first, first + count) of all that are sorted.
struct Gathering {
  int64_t expert, first, count;

  // How many of them are multiplied one by one. Kernels for q8 take four rows at a time and one alone for less than half of that, so of 5, 9
  // or 13 rows the last goes alone.
  int64_t alone(int digits) const { return digits == 1 && count > 4 && count % 4 == 1 ? 1 : 0; }
};

// The places t * chosen + j of ids [tokens, chosen], sorted by expert; those of one expert stay in order.
struct Sorted {
  std::vector<Gathering> gatherings;    // of experts that somebody chose
  std::vector<int64_t> places;  // of each sorted row
  std::vector<int64_t> rows;    // the sorted row of each place

  Sorted(const int32_t* ids, int64_t count, int64_t experts) : places(size_t(count)), rows(size_t(count)) {
    std::vector<int64_t> next(size_t(experts) + 1);
    for (int64_t i = 0; i < count; i++) next[size_t(ids[i]) + 1]++;
    for (int64_t e = 0; e < experts; e++) {
      const int64_t first = next[size_t(e)], own = next[size_t(e) + 1];
      if (own > 0) gatherings.push_back({e, first, own});
      next[size_t(e) + 1] += first;
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t row = next[size_t(ids[i])]++;
      places[size_t(row)] = i, rows[size_t(i)] = row;
    }
  }
};

// A gathering is the group of rows that chose one expert. Which tiles of which groups a thread has: f(group, first tile, last tile).
template <class F> void each_gathering(int64_t tiles, int64_t first, int64_t last, F f) {
  for (int64_t g = first / tiles; g * tiles < last; g++) f(size_t(g), std::max<int64_t>(first - g * tiles, 0), std::min(last - g * tiles, tiles));
}

int64_t tiles_of(const Level& level, const ExpertStack& stack) { return (stack.weights.n + level.tile_rows - 1) / level.tile_rows; }

// Memory that a thread keeps from call to call: x of each group of rows, and intermediate results.
struct Kept {
  std::deque<Rows> x, h;
  std::vector<float> gate, up, sorted;

  size_t bytes() const {
    size_t all = (gate.capacity() + up.capacity() + sorted.capacity()) * sizeof(float);
    for (const std::deque<Rows>* some : {&x, &h})
      for (const Rows& rows : *some) all += rows.bytes();
    return all;
  }
};

Kept& kept() {
  static thread_local Kept room;
  return room;
}

struct Lent {
  Kept& room = kept();
  ~Lent() {
    if (room.bytes() > KEPT_BYTES) room = Kept();
  }
};

float* at_least(std::vector<float>& room, int64_t count) {
  if (room.size() < size_t(count)) room.resize(size_t(count));
  return room.data();
}

// Tiles that all rows of a group pass over before the next tiles: their stream stays in the L2 cache.
constexpr int64_t TILES_TOGETHER = 8;

// Rows of x, prepared for the experts that they are multiplied with.
class GatheredRows {
 public:
  // make(sorted row, out) writes a row of x [k]. One row that all have is made once.
  template <class Make>
  GatheredRows(const Level& level, std::deque<Rows>& rows, const std::vector<Gathering>& gatherings, bool one_row,
               const std::vector<const ExpertStack*>& stacks, int digits, Make make)
      : rows_(rows) {
    const int64_t k = stacks[0]->weights.k, blocks = blocks_of(k);
    std::vector<const Weights*> kinds;
    for (const ExpertStack* stack : stacks) kinds.push_back(&stack->weights);
    for (const Gathering& all : gatherings) {
      const size_t number = one_row ? 0 : runs_.size();
      runs_.push_back({number, all.first, all.count - all.alone(digits)});
      ends_.push_back(runs_.size());
      if (all.alone(digits)) runs_.push_back({number + 1, all.first + all.count - 1, 1}), ends_.back()++;
    }
    struct Piece {
      const Run* run;
      Prepared::Part part;
    };
    std::vector<Piece> pieces;
    int64_t numbers = 0;
    for (size_t i = 0; i < (one_row ? 1 : runs_.size()); i++) {
      const Run& run = runs_[i];
      if (rows.size() == i) rows.emplace_back();
      rows[i].begin(level, run.count, k, digits);
      rows[i].expect(kinds);
      for (int64_t row = 0; row < run.count; row += 8) pieces.push_back({&run, {row, std::min<int64_t>(8, run.count - row), 0, blocks}});
      numbers += run.count * k;
    }
    share_out(int64_t(pieces.size()), numbers, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const auto& [run, part] = pieces[size_t(i)];
        rows[run->rows].fill_part(part, [&, before = run->first](int64_t row, float* to) { make(before + row, to); });
      }
    });
  }

  // Tiles [first, last) of the product of a group's rows with its expert; y [sorted rows, n].
  void multiply(const ExpertStack& stack, const Gathering& gathering, size_t number, float* y, int64_t first, int64_t last) const {
    const Weights own = stack.of(gathering.expert);
    const size_t begin = number == 0 ? 0 : ends_[number - 1], end = ends_[number];
    for (int64_t tile = first; tile < last; tile += TILES_TOGETHER)
      for (size_t i = begin; i < end; i++) {
        const Run& run = runs_[i];
        rows_[run.rows].multiply_tiles({own, stack.bias_of(gathering.expert), y + run.first * own.n}, tile, std::min(last, tile + TILES_TOGETHER));
      }
  }

 private:
  struct Run {
    size_t rows;           // which of rows_ has them
    int64_t first, count;  // sorted rows
  };
  const std::deque<Rows>& rows_;
  std::vector<Run> runs_;
  std::vector<size_t> ends_;  // of the runs of each group
};

}  // namespace

size_t kept_by_experts() { return kept().bytes(); }

void multiply_experts(const Level& level, const float* x, bool each_its_own, int64_t tokens, const int32_t* ids, int64_t chosen,
                      const ExpertStack& stack, int digits, float* y) {
  const Lent lent;
  const Sorted sorted(ids, tokens * chosen, stack.experts);
  const std::vector<Gathering>& gatherings = sorted.gatherings;
  const int64_t n = stack.weights.n, k = stack.weights.k, tiles = tiles_of(level, stack), each = each_its_own ? 1 : chosen;
  const bool one_row = tokens == 1 && !each_its_own && int64_t(gatherings.size()) == chosen;
  const GatheredRows rows(level, lent.room.x, gatherings, one_row, {&stack}, digits,
                         [&](int64_t row, float* to) { std::copy_n(x + sorted.places[size_t(row)] / each * k, k, to); });
  float* made = at_least(lent.room.sorted, tokens * chosen * n);
  parallel_for(int64_t(gatherings.size()) * tiles, [&](int64_t begin, int64_t end) {
    each_gathering(tiles, begin, end, [&](size_t g, int64_t first, int64_t last) {
      rows.multiply(stack, gatherings[g], g, made, first, last);
      const int64_t column = first * level.tile_rows, count = std::min(last * level.tile_rows, n) - column;
      for (int64_t row = gatherings[g].first; row < gatherings[g].first + gatherings[g].count; row++)
        std::copy_n(made + row * n + column, count, y + sorted.places[size_t(row)] * n + column);
    });
  });
}

void run_experts(const Level& level, const float* x, int64_t tokens, const int32_t* ids, const float* routing, int64_t chosen,
                 const ExpertStack& gate, const ExpertStack* up, const ExpertStack& down, int activation, int digits, float* y,
                 const ObserveExpert& observe) {
  const Lent lent;
  const Sorted sorted(ids, tokens * chosen, down.experts);
  const std::vector<Gathering>& gatherings = sorted.gatherings;
  const int64_t count = tokens * chosen, hidden = down.weights.n, inner = down.weights.k;
  const bool one_row = tokens == 1 && int64_t(gatherings.size()) == chosen;

  std::vector<const ExpertStack*> stacks{&gate};
  if (up) stacks.push_back(up);
  const GatheredRows rows(level, lent.room.x, gatherings, one_row, stacks, digits,
                         [&](int64_t row, float* to) { std::copy_n(x + sorted.places[size_t(row)] / chosen * hidden, hidden, to); });
  float* gates = at_least(lent.room.gate, count * gate.weights.n);
  float* ups = up ? at_least(lent.room.up, count * inner) : gates + inner;
  const int64_t gate_tiles = tiles_of(level, gate), tiles = gate_tiles + (up ? tiles_of(level, *up) : 0);
  parallel_for(int64_t(gatherings.size()) * tiles, [&](int64_t begin, int64_t end) {
    each_gathering(tiles, begin, end, [&](size_t g, int64_t first, int64_t last) {
      if (first < gate_tiles) rows.multiply(gate, gatherings[g], g, gates, first, std::min(last, gate_tiles));
      if (last > gate_tiles) rows.multiply(*up, gatherings[g], g, ups, std::max<int64_t>(first - gate_tiles, 0), last - gate_tiles);
    });
  });

  const int64_t stride = gate.weights.n;  // of both: `up` has as many rows, or its rows are among those of `gate`
  const GatheredRows opened(level, lent.room.h, gatherings, false, {&down}, digits, [&](int64_t row, float* to) {
    level.open_gate(gates + row * stride, ups + row * stride, Gate(activation), inner, to);
  });
  if (observe)
    for (const auto& [expert, first, own] : gatherings) {
      std::vector<float> seen(size_t(own * (hidden + inner)));
      float* h = seen.data() + own * hidden;
      for (int64_t i = 0, row = first; i < own; i++, row++) {
        std::copy_n(x + sorted.places[size_t(row)] / chosen * hidden, hidden, seen.data() + i * hidden);
        level.open_gate(gates + row * stride, ups + row * stride, Gate(activation), inner, h + i * inner);
      }
      observe(expert, own, seen.data(), h);
    }
  // Whoever has the same tiles of all experts has all that some columns of y are made of.
  float* made = at_least(lent.room.sorted, count * hidden);
  parallel_for(tiles_of(level, down), [&](int64_t first, int64_t last) {
    for (size_t g = 0; g < gatherings.size(); g++) opened.multiply(down, gatherings[g], g, made, first, last);
    const int64_t column = first * level.tile_rows, end = std::min(last * level.tile_rows, hidden);
    for (int64_t t = 0; t < tokens; t++) {
      float* to = y + t * hidden;
      std::fill(to + column, to + end, 0.0f);
      for (int64_t j = t * chosen; j < (t + 1) * chosen; j++) {
        const float *from = made + sorted.rows[size_t(j)] * hidden, weight = routing[j];
        for (int64_t i = column; i < end; i++) to[i] += weight * from[i];
      }
    }
  });
}

}  // namespace billfish
