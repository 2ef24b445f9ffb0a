// Tiles of y: a slab of x in threadgroup memory, weights decoded in registers, and their products in simdgroup matrices.
//
// A threadgroup of two simdgroups computes 64 rows of two panels of y, a run of K at a time. Each simdgroup has one panel of
// 16 columns, so that no weight is fetched or decoded twice. It computes y transposed, W times x transposed: a lane's two
// numbers of an 8x8 matrix of W are then the pair of codes that one word has, and nothing passes from lane to lane.
namespace billfish {

constexpr constant int TILE_M = 64;
constexpr constant int TILE_PANELS = 2;

// The slab is x transposed, TILE_M numbers for each k, padded by 16 bytes so that eight k begin in eight different banks.
template <typename T>
struct Slab {
  static constexpr constant int stride = TILE_M + 16 / sizeof(T);
  static constexpr constant int size = RUN * stride;
};

// Where a lane's two numbers are in an 8x8 matrix: (row, 2 * pair) and (row, 2 * pair + 1). MLX's own kernels rely on it.
METAL_FUNC int matrix_row(int lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }
METAL_FUNC int matrix_pair(int lane) { return (lane >> 2 & 2) | (lane & 1); }

// ---- which rows tiles are made of: there are kinds of it, and this is all rows of x, in their order

struct AllRows {
  int m;

  METAL_FUNC bool has(int row) const thread { return row < m; }
  METAL_FUNC int source(int row) const thread { return row; }  // the row of x
  METAL_FUNC int target(int row) const thread { return row; }  // the row of y
};

// ---- x [.., k]: each thread moves eight k of a few rows

template <typename T>
struct InputRuns {
  static constexpr constant int ROWS = 8 / TILE_PANELS;
  Four<T> runs[2 * ROWS];
  int sources[ROWS];  // rows of x; -1 where there is none
  bool full;          // there are all

  template <typename Rows>
  METAL_FUNC void choose(Rows rows, int row0, int index) thread {
    full = true;
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = row0 + index / 4 * ROWS + r;
      sources[r] = rows.has(row) ? rows.source(row) : -1;
      full = full && sources[r] >= 0;
    }
  }

  METAL_FUNC void fetch(const device T* x, int k, int k0, int index) thread {
    const int at = k0 + index % 4 * 8, left = k - at;  // K is a multiple of 4: four are inside or outside as a whole
    if (full && left >= 8) {
      #pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const device T* from = x + (long(sources[r]) * k + at);
        runs[2 * r] = *(const device Four<T>*)from;
        runs[2 * r + 1] = *(const device Four<T>*)(from + 4);
      }
    } else {
      #pragma unroll
      for (int i = 0; i < 2 * ROWS; i++) {
        runs[i] = {{T(0), T(0), T(0), T(0)}};
        const int source = sources[i / 2], skipped = i % 2 * 4;
        if (source >= 0 && skipped < left) runs[i] = *(const device Four<T>*)(x + (long(source) * k + at + skipped));
      }
    }
  }

  METAL_FUNC void put(threadgroup T* slab, int index) const thread {
    constexpr int stride = Slab<T>::stride;
    threadgroup T* to = slab + (index % 4 * 8 * stride + index / 4 * ROWS);
    #pragma unroll
    for (int j = 0; j < 8; j++) {
      vec<T, ROWS> side;
      #pragma unroll
      for (int r = 0; r < ROWS; r++) side[r] = runs[2 * r + j / 4].v[j % 4];
      *(threadgroup vec<T, ROWS>*)(to + j * stride) = side;
    }
  }
};

// ---- weights: a lane's part of a run, in two columns of a panel, 8 apart

template <typename W>
struct WeightParts {
  Part parts[2];
  Group groups[2 * W::halves];

  METAL_FUNC void fetch(W w, int run, int lane) thread {
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const int column = 8 * j + matrix_row(lane);
      parts[j] = W::Element::part(w.words(run, column), w.high_words(run, column), matrix_pair(lane));
      w.template groups<1>(run, column, groups + j * W::halves);
    }
  }

  // Column 8j + matrix_row(lane), k = 8t + 2 * matrix_pair(lane) and the next one.
  template <typename T>
  METAL_FUNC float2 pair(int j, int t) const thread {
    const Group group = groups[j * W::halves + t / 2 % W::halves];
    return W::template weights_as<T>(W::Element::pair(parts[j], t), t, group);
  }

  // Columns 8j .. 8j + 7, k = 8t .. 8t + 7 of the run.
  template <typename T>
  METAL_FUNC void matrix(int j, int t, thread simdgroup_matrix<T, 8, 8>& out) const thread {
    const float2 v = pair<T>(j, t);
    out.thread_elements()[0] = T(v.x);
    out.thread_elements()[1] = T(v.y);
  }

  // All of it, columns `stride` apart.
  template <typename T>
  METAL_FUNC void put(threadgroup T* to, int stride, int lane) const thread {
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      const float2 v = pair<T>(i / 4, i % 4);
      vec<T, 2> side;
      side[0] = T(v.x), side[1] = T(v.y);
      *(threadgroup vec<T, 2>*)(to + (8 * (i / 4) + matrix_row(lane)) * stride + 8 * (i % 4) + 2 * matrix_pair(lane)) = side;
    }
  }
};

// ---- products

// sums [TILE_M / 8][2] of 8x8, columns by rows, += weights times the rows of a slab. WHOLE: all rows are wanted, and all k are
// inside; else rows [first, last) are, and `left` k, whatever the scales beyond them may be.
template <bool WHOLE, typename T, typename W>
METAL_FUNC void multiply_slab(const threadgroup T* slab, WeightParts<W> w, int left, int first, int last, int lane,
                              thread simdgroup_matrix<float, 8, 8>* sums) {
  constexpr int stride = Slab<T>::stride;
  #pragma unroll
  for (int t = 0; t < 4; t++) {
    simdgroup_matrix<T, 8, 8> a[2];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      w.matrix(j, t, a[j]);
      if (!WHOLE && 8 * t + 2 * matrix_pair(lane) >= left) a[j].thread_elements()[0] = a[j].thread_elements()[1] = T(0);
    }
    #pragma unroll
    for (int i = 0; i < TILE_M / 8; i++) {
      if (WHOLE || (8 * i < last && 8 * i + 8 > first)) {
        simdgroup_matrix<T, 8, 8> b;
        simdgroup_load(b, slab + 8 * t * stride + 8 * i, stride);
        simdgroup_multiply_accumulate(sums[2 * i], a[0], b, sums[2 * i]);
        simdgroup_multiply_accumulate(sums[2 * i + 1], a[1], b, sums[2 * i + 1]);
      }
    }
  }
}

// One tile of W @ x.T over the runs from `begin` to `end`; of its rows, [first, last) are wanted. With two buffers of x there
// is one barrier for each run, with one there are two. What comes next is on its way through registers meanwhile.
template <int BUFFERS, typename T, typename Rows, typename W>
METAL_FUNC void sum_tile(const device T* x, Rows rows, W w, int row0, int first, int last, int panel, int begin, int end,
                         threadgroup T* slabs, int index, thread simdgroup_matrix<float, 8, 8>* sums) {
  const int lane = index % 32;
  const W own = w.from(panel);
  const bool active = panel < w.panels(), all = first == 0 && last == TILE_M;
  InputRuns<T> next_x;
  WeightParts<W> next_w;

  #pragma unroll
  for (int i = 0; i < TILE_M / 4; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  next_x.choose(rows, row0, index);
  if (begin < end) next_x.fetch(x, w.k, begin * RUN, index);
  if (begin < end && active) next_w.fetch(own, begin, lane);
  for (int run = begin; run < end; run++) {
    threadgroup T* slab = slabs + (BUFFERS == 2 ? run % 2 * Slab<T>::size : 0);
    if (BUFFERS == 1) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // everybody is done with the slab
    }
    next_x.put(slab, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // it is full; and nobody reads the other any more
    const WeightParts<W> now = next_w;
    if (run + 1 < end) {
      next_x.fetch(x, w.k, (run + 1) * RUN, index);
      if (active) next_w.fetch(own, run + 1, lane);
    }
    const int left = w.k - run * RUN;
    if (active && all && left >= RUN) {
      multiply_slab<true>(slab, now, left, first, last, lane, sums);
    } else if (active) {
      multiply_slab<false>(slab, now, left, first, last, lane, sums);
    }
  }
}

// Sums to y, with the bias, rounded once.
template <bool HAS_BIAS, typename T, typename B, typename Rows>
METAL_FUNC void store_tile(thread simdgroup_matrix<float, 8, 8>* sums, device T* y, const device B* bias, Rows rows, int n,
                           int row0, int panel, int lane) {
  #pragma unroll
  for (int j = 0; j < 2; j++) {
    const int column = panel * PANEL + 8 * j + matrix_row(lane);
    if (column >= n) continue;
    const float added = HAS_BIAS ? float(bias[column]) : 0.0f;
    #pragma unroll
    for (int i = 0; i < TILE_M / 8; i++) {
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = row0 + 8 * i + 2 * matrix_pair(lane) + e;
        const float sum = sums[2 * i + j].thread_elements()[e];
        if (rows.has(row)) y[long(rows.target(row)) * n + column] = T(HAS_BIAS ? sum + added : sum);
      }
    }
  }
}

}  // namespace billfish
