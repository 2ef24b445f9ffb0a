// Few rows of x: each weight is read from memory once and multiplied with all of them, in float, by the lane that decodes it.
//
// A simdgroup has 32 * COLUMNS columns, COLUMNS side by side for each lane, and a slice of K; the simdgroups of a threadgroup
// have the same columns and different slices, and add up at the end.
namespace billfish {

// K in slices for so many simdgroups: whole groups, where groups are not all of K, and whole steps of 32.
template <int GROUP>
METAL_FUNC int slice_length(int k, int simdgroups) {
  const int unit = GROUP > 32 ? GROUP : 32;
  return ((k + unit - 1) / unit + simdgroups - 1) / simdgroups * unit;
}

// sums [ROWS][COLUMNS] of x rows times weights, over k from k_begin to k_end. `staged` is for ROWS * 32 floats of x.
template <int ROWS, int COLUMNS, typename T, typename W>
METAL_FUNC void sum_columns(const device T* x, int m, W w, int column, int k_begin, int k_end, threadgroup float* staged,
                            int lane, thread float* sums) {
  constexpr int word_k = W::word_k, quads = word_k / 4, words_in_step = 32 / word_k;
  constexpr int run_k = W::group_k == 16 ? 16 : 32;  // k that share a scale, within a step of 32
  const bool active = column < w.n;
  Group groups[COLUMNS];
  for (int k0 = k_begin; k0 < k_end; k0 += 32) {
    // Loads first: they are on their way while x is put in its place.
    uint words[words_in_step * COLUMNS] = {0}, high[COLUMNS] = {0};
    if (active) {
      #pragma unroll
      for (int i = 0; i < words_in_step; i++) {
        if (k0 + i * word_k < k_end) {
          load_columns<COLUMNS>(w.codes + long(k0 / word_k + i) * w.n + column, words + i * COLUMNS);
        }
      }
      if (W::Element::has_high) load_columns<COLUMNS>(w.high + long(k0 / 32) * w.n + column, high);
    }
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
      staged[r * 32 + lane] = r < m && k0 + lane < k_end ? float(x[long(r) * w.k + k0 + lane]) : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (active) {
      #pragma unroll
      for (int run = 0; run < 32; run += run_k) {
        if (k0 + run >= k_end) continue;
        if (k0 == k_begin || W::begins_group(k0 + run)) w.template groups<COLUMNS>(column, k0 + run, groups);
        float products[ROWS * COLUMNS] = {0};
        #pragma unroll
        for (int i = run / word_k; i < (run + run_k) / word_k; i++) {
          if (W::has_offset && k0 + i * word_k >= k_end) break;  // there an infinite scale times a zero of x would be NaN
          float4 values[COLUMNS * quads];
          #pragma unroll
          for (int c = 0; c < COLUMNS; c++) {
            half4 codes[quads];
            W::Element::decode(words[i * COLUMNS + c], high[c] >> (i * word_k), codes);
            #pragma unroll
            for (int q = 0; q < quads; q++) values[c * quads + q] = W::unscaled(float4(codes[q]), groups[c]);
          }
          #pragma unroll
          for (int r = 0; r < ROWS; r++) {
            #pragma unroll
            for (int q = 0; q < quads; q++) {
              const float4 four = *(const threadgroup float4*)(staged + r * 32 + i * word_k + 4 * q);
              #pragma unroll
              for (int c = 0; c < COLUMNS; c++) products[r * COLUMNS + c] += dot(four, values[c * quads + q]);
            }
          }
        }
        #pragma unroll
        for (int i = 0; i < ROWS * COLUMNS; i++) sums[i] += W::scaled(products[i], groups[i % COLUMNS]);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // everybody is done with x
  }
}

// The sums of all slices, added up in their order, to y [m, n] with the bias, rounded once. `part` is which slice is in `sums`;
// `scratch` is for 32 * COLUMNS floats of each.
template <int ROWS, int COLUMNS, int SIMDGROUPS, bool HAS_BIAS, typename T, typename B>
METAL_FUNC void store_columns(thread const float* sums, threadgroup float* scratch, device T* y, const device B* bias, int m,
                              int n, int column0, int part, int lane) {
  for (int r = 0; r < ROWS; r++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < COLUMNS; c++) scratch[(part * 32 + lane) * COLUMNS + c] = sums[r * COLUMNS + c];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = part * 32 + lane; i < 32 * COLUMNS; i += 32 * SIMDGROUPS) {
      if (r < m && column0 + i < n) {
        float sum = scratch[i];
        for (int s = 1; s < SIMDGROUPS; s++) sum += scratch[s * 32 * COLUMNS + i];
        y[long(r) * n + column0 + i] = T(HAS_BIAS ? sum + float(bias[column0 + i]) : sum);
      }
    }
  }
}

}  // namespace billfish
