// Tiles of y: a slab of x in threadgroup memory, weights decoded in registers, and their products in simdgroup matrices.
//
// A threadgroup of four simdgroups computes TILE_M x TILE_N of y, a run of K at a time. Each simdgroup has all rows and one panel of 16
// columns, so that no weight is fetched or decoded twice. It computes y transposed, W times x transposed: a lane's two numbers of
// an 8x8 matrix of W are then the pair of codes that one word has, and nothing passes from lane to lane.
namespace billfish {

constexpr constant int TILE_M = 64;
constexpr constant int TILE_N = 64;

// A row of the slab, padded by 16 bytes so that eight rows begin in eight different banks.
template <typename T>
struct Slab {
  static constexpr constant int stride = RUN + 16 / sizeof(T);
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

// ---- x [.., k]: each thread moves TILE_M / 16 runs of four

template <typename T>
struct InputRuns {
  vec<T, 4> runs[TILE_M / 16];
  int sources[TILE_M / 16];  // rows of x; -1 where there is none

  template <typename Rows>
  METAL_FUNC void choose(Rows rows, int row0, int index) thread {
    #pragma unroll
    for (int i = 0; i < TILE_M / 16; i++) {
      const int row = row0 + index / 8 + 16 * i;
      sources[i] = rows.has(row) ? rows.source(row) : -1;
    }
  }

  METAL_FUNC void fetch(const device T* x, int k, int k0, int index) thread {
    const int at = k0 + index % 8 * 4;  // K is a multiple of 4: a run is inside or outside as a whole
    #pragma unroll
    for (int i = 0; i < TILE_M / 16; i++) {
      Four<T> four = {{T(0), T(0), T(0), T(0)}};
      if (sources[i] >= 0 && at < k) four = *(const device Four<T>*)(x + long(sources[i]) * k + at);
      runs[i] = vec<T, 4>(four.v[0], four.v[1], four.v[2], four.v[3]);
    }
  }

  METAL_FUNC void put(threadgroup T* slab, int index) const thread {
    #pragma unroll
    for (int i = 0; i < TILE_M / 16; i++) {
      *(threadgroup vec<T, 4>*)(slab + (index / 8 + 16 * i) * Slab<T>::stride + index % 8 * 4) = runs[i];
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

  // Columns 8j .. 8j + 7, k = 8t .. 8t + 7 of the run. `left` is how many k it has: beyond K are zeros, whatever the scale is.
  template <typename T>
  METAL_FUNC void matrix(int j, int t, int left, int lane, thread simdgroup_matrix<T, 8, 8>& out) const thread {
    const float2 v = W::weights(W::Element::pair(parts[j], t), t, groups[j * W::halves + t / 2 % W::halves]);
    const bool inside = left >= RUN || 8 * t + 2 * matrix_pair(lane) < left;
    out.thread_elements() = vec<T, 2>(inside ? T(v.x) : T(0), inside ? T(v.y) : T(0));
  }
};

// ---- products

// sums [TILE_M / 8][2] of 8x8, columns by rows, += weights times the rows of a slab, of which [first, last) are wanted.
template <bool ALL, typename T, typename W>
METAL_FUNC void multiply_slab(const threadgroup T* slab, WeightParts<W> w, int left, int first, int last, int lane,
                              thread simdgroup_matrix<float, 8, 8>* sums) {
  constexpr int stride = Slab<T>::stride;
  #pragma unroll
  for (int t = 0; t < 4; t++) {
    simdgroup_matrix<T, 8, 8> a[2];
    #pragma unroll
    for (int j = 0; j < 2; j++) w.matrix(j, t, left, lane, a[j]);
    #pragma unroll
    for (int i = 0; i < TILE_M / 8; i++) {
      if (ALL || (8 * i < last && 8 * i + 8 > first)) {
        simdgroup_matrix<T, 8, 8> b;
        simdgroup_load(b, slab + 8 * i * stride + 8 * t, stride, ulong2(0), true);
        simdgroup_multiply_accumulate(sums[2 * i], a[0], b, sums[2 * i]);
        simdgroup_multiply_accumulate(sums[2 * i + 1], a[1], b, sums[2 * i + 1]);
      }
    }
  }
}

// One tile of W @ x.T over the runs from `begin` to `end`; of its rows, [first, last) are wanted. With two buffers of x there is one barrier
// for each run, with one there are two. What comes next is on its way through registers meanwhile.
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
    threadgroup T* slab = slabs + (BUFFERS == 2 ? run % 2 * TILE_M * Slab<T>::stride : 0);
    if (BUFFERS == 1) threadgroup_barrier(mem_flags::mem_threadgroup);  // everybody is done with the slab
    next_x.put(slab, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // it is full; and nobody reads the other any more
    const WeightParts<W> now = next_w;
    if (run + 1 < end) {
      next_x.fetch(x, w.k, (run + 1) * RUN, index);
      if (active) next_w.fetch(own, run + 1, lane);
    }
    if (active && all) multiply_slab<true>(slab, now, w.k - run * RUN, first, last, lane, sums);
    if (active && !all) multiply_slab<false>(slab, now, w.k - run * RUN, first, last, lane, sums);
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
