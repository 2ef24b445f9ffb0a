// Tiles of y: slabs of x and of decoded weights in threadgroup memory, and their products in simdgroup matrices.
//
// A threadgroup of 128 threads computes TILE_M x TILE_N of y, TILE_K of K at a time. A slab holds TILE_K numbers of
// each row, k side by side: TILE_M rows of x, or TILE_N rows of the weights.
namespace billfish {

constexpr constant int TILE_N = 64;
constexpr constant int TILE_K = 32;
constexpr constant int RUN_K = 16;  // k that one thread decodes in one column: they share a scale

// A row of a slab, padded by 16 bytes so that eight rows begin in eight different banks.
template <typename T>
struct Slab {
  static constexpr constant int stride = TILE_K + 16 / sizeof(T);
};

// Four numbers at once, wherever they begin: x may be a slice at any offset.
template <typename T>
struct alignas(sizeof(T)) Four {
  T v[4];
};

// ---- which rows tiles are made of: there are kinds of it, and this is all rows of x, in their order

struct AllRows {
  int m;

  METAL_FUNC bool has(int row) const thread { return row < m; }
  METAL_FUNC int source(int row) const thread { return row; }  // the row of x
  METAL_FUNC int target(int row) const thread { return row; }  // the row of y
};

// ---- x [.., k]: each thread moves TILE_M / 16 runs of four

template <int TILE_M, typename T>
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

// ---- weights: RUN_K of one column

template <typename W>
struct WeightRun {
  static constexpr constant int word_count = RUN_K / W::word_k;
  uint words[word_count];
  uint high;
  Group group;

  // From `at` on, a multiple of RUN_K. The group's values stay while the group does; `first` says that there are none yet.
  METAL_FUNC void fetch(W w, int column, int at, bool first) thread {
    const bool inside = column < w.n && at < w.k;
    #pragma unroll
    for (int i = 0; i < word_count; i++) {
      words[i] = inside && at + i * W::word_k < w.k ? w.word(column, at + i * W::word_k) : 0;
    }
    high = inside ? w.high_bits(column, at) : 0;
    if (first) group = {0.0f, 0.0f, 0.0f};
    if (inside && (first || W::group_of(at) != W::group_of(at - TILE_K))) group = w.group(column, at);
  }

  // Decoded, side by side. Beyond K they are zeros, whatever the scale is.
  template <typename T>
  METAL_FUNC void put(threadgroup T* row, int at, int k) const thread {
    #pragma unroll
    for (int i = 0; i < word_count; i++) {
      half4 codes[W::word_k / 4];
      W::Element::decode(words[i], high >> (i * W::word_k), codes);
      #pragma unroll
      for (int q = 0; q < W::word_k / 4; q++) {
        float4 v = W::apply(float4(codes[q]), group);
        if (at + i * W::word_k >= k) v = float4(0.0f);
        *(threadgroup vec<T, 4>*)(row + i * W::word_k + 4 * q) = vec<T, 4>(v);
      }
    }
  }
};

// ---- products

// sums [ROW_MATRICES][COLUMN_MATRICES] of 8x8 += x rows [.., TILE_K] times weight rows [.., TILE_K] transposed.
template <int ROW_MATRICES, int COLUMN_MATRICES, typename T>
METAL_FUNC void multiply_slabs(const threadgroup T* x_rows, const threadgroup T* w_rows,
                               thread simdgroup_matrix<float, 8, 8>* sums) {
  constexpr int stride = Slab<T>::stride;
  #pragma unroll
  for (int k = 0; k < TILE_K; k += 8) {
    simdgroup_matrix<T, 8, 8> a[ROW_MATRICES], b[COLUMN_MATRICES];
    #pragma unroll
    for (int i = 0; i < ROW_MATRICES; i++) simdgroup_load(a[i], x_rows + 8 * i * stride + k, stride);
    #pragma unroll
    for (int j = 0; j < COLUMN_MATRICES; j++) simdgroup_load(b[j], w_rows + 8 * j * stride + k, stride, ulong2(0), true);
    #pragma unroll
    for (int i = 0; i < ROW_MATRICES; i++) {
      #pragma unroll
      for (int j = 0; j < COLUMN_MATRICES; j++) {
        simdgroup_multiply_accumulate(sums[i * COLUMN_MATRICES + j], a[i], b[j], sums[i * COLUMN_MATRICES + j]);
      }
    }
  }
}

// Sums to y, with the bias, rounded once. They pass through `scratch`, 64 * COLUMN_MATRICES floats for each simdgroup, because
// which lane holds which number of a simdgroup matrix is nobody's promise.
template <int ROW_MATRICES, int COLUMN_MATRICES, bool HAS_BIAS, typename T, typename B, typename Rows>
METAL_FUNC void store_sums(thread simdgroup_matrix<float, 8, 8>* sums, threadgroup float* scratch, device T* y,
                           const device B* bias, Rows rows, int n, int row0, int column0, int lane) {
  constexpr int width = 8 * COLUMN_MATRICES;
  #pragma unroll
  for (int i = 0; i < ROW_MATRICES; i++) {
    #pragma unroll
    for (int j = 0; j < COLUMN_MATRICES; j++) simdgroup_store(sums[i * COLUMN_MATRICES + j], scratch + 8 * j, width);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane; e < 8 * width; e += 32) {
      const int row = row0 + 8 * i + e / width, column = column0 + e % width;
      if (rows.has(row) && column < n) {
        y[long(rows.target(row)) * n + column] = T(HAS_BIAS ? scratch[e] + float(bias[column]) : scratch[e]);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// ---- the double-buffered pipeline: four simdgroups, 2 x 2, of TILE_M / 16 x 4 matrices of 8x8

// One tile of x @ W.T over k from k_begin to k_end. While one pair of buffers is multiplied, the next is on its way through
// registers to the other: one barrier for each TILE_K.
template <int TILE_M, typename T, typename Rows, typename W>
METAL_FUNC void sum_tile(const device T* x, Rows rows, W w, int row0, int column0, int k_begin, int k_end,
                         threadgroup T* x_slabs, threadgroup T* w_slabs, int index, thread simdgroup_matrix<float, 8, 8>* sums) {
  constexpr int stride = Slab<T>::stride;
  const int simdgroup_row = index / 64 * (TILE_M / 2), simdgroup_column = index / 32 % 2 * 32;
  const int column = index % TILE_N, run = index / TILE_N * RUN_K;  // what this thread decodes
  InputRuns<TILE_M, T> next_x;
  WeightRun<W> next_w;

  #pragma unroll
  for (int i = 0; i < TILE_M / 16 * 4; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  next_x.choose(rows, row0, index);
  next_x.fetch(x, w.k, k_begin, index);
  next_w.fetch(w, column0 + column, k_begin + run, true);
  next_x.put(x_slabs, index);
  next_w.put(w_slabs + column * stride + run, k_begin + run, w.k);
  int buffer = 0;
  for (int k0 = k_begin; k0 < k_end; k0 += TILE_K) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // this buffer is full, and nobody reads the other any more
    const bool more = k0 + TILE_K < k_end;
    if (more) {
      next_x.fetch(x, w.k, k0 + TILE_K, index);
      next_w.fetch(w, column0 + column, k0 + TILE_K + run, false);
    }
    multiply_slabs<TILE_M / 16, 4>(x_slabs + (buffer * TILE_M + simdgroup_row) * stride,
                                   w_slabs + (buffer * TILE_N + simdgroup_column) * stride, sums);
    buffer = 1 - buffer;
    if (more) {
      next_x.put(x_slabs + buffer * TILE_M * stride, index);
      next_w.put(w_slabs + (buffer * TILE_N + column) * stride + run, k0 + TILE_K + run, w.k);
    }
  }
}

}  // namespace billfish
