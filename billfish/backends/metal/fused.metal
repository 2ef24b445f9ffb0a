// Weights decoded in registers: no slab of them in threadgroup memory, only 8x8 numbers for each simdgroup.
//
// Four simdgroups side by side, each with all TILE_M rows and 16 of the 64 columns, so that no weight is fetched or decoded
// twice. A lane fetches 16 k of one column; to fill an 8x8 matrix, each of 32 lanes takes a word from the lane that has it
// and decodes two of its codes.
namespace billfish {

constexpr constant int FUSED_COLUMNS = 16;

template <int TILE_M, typename T, typename Rows, typename W>
METAL_FUNC void sum_tile_fused(const device T* x, Rows rows, W w, int row0, int column0, threadgroup T* x_slab,
                               threadgroup T* staging, int index, thread simdgroup_matrix<float, 8, 8>* sums) {
  constexpr int stride = Slab<T>::stride, word_k = W::word_k, pairs = word_k / 2;
  const int lane = index % 32;
  const int pair = lane / 8 % pairs;                     // which two codes of a word this lane decodes
  const int pair_k = lane / 8 / pairs * word_k + pair;   // and where the first of them belongs in a step of 8 k
  InputRuns<TILE_M, T> next_x;
  WeightRun<W> run;

  #pragma unroll
  for (int i = 0; i < TILE_M / 4; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  next_x.choose(rows, row0, index);
  for (int k0 = 0; k0 < w.k; k0 += TILE_K) {
    next_x.fetch(x, w.k, k0, index);
    run.fetch(w, column0 + lane % FUSED_COLUMNS, k0 + lane / FUSED_COLUMNS * RUN_K, k0 == 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // everybody is done with the last slab
    next_x.put(x_slab, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma unroll
    for (int step = 0; step < TILE_K / 8; step++) {
      simdgroup_matrix<T, 8, 8> b[2];
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        const ushort owner = 8 * j + lane % 8 + step / 2 * FUSED_COLUMNS;
        uint word = simd_shuffle(run.words[step % 2 * (8 / word_k)], owner);
        if (word_k == 4) {
          const uint second = simd_shuffle(run.words[step % 2 * (8 / word_k) + 8 / word_k - 1], owner);
          word = lane < 16 ? word : second;
        }
        const uint high = W::Element::has_high ? simd_shuffle(run.high, owner) >> (step % 2 * 8) : 0;
        Group group = {simd_shuffle(run.group.scale, owner), 0.0f, 0.0f};
        if (W::has_offset) {
          group.zero = simd_shuffle(run.group.zero, owner);
          group.minimum = simd_shuffle(run.group.minimum, owner);
        }
        float2 v = W::apply(float2(W::Element::pair(word, high, pair)), group);
        if (k0 + 8 * step + pair_k / word_k * word_k >= w.k) v = float2(0.0f);
        staging[pair_k * 8 + lane % 8] = T(v.x);
        staging[(pair_k + pairs) * 8 + lane % 8] = T(v.y);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_load(b[j], staging, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
      }
      #pragma unroll
      for (int i = 0; i < TILE_M / 8; i++) {
        simdgroup_matrix<T, 8, 8> a;
        simdgroup_load(a, x_slab + 8 * i * stride + 8 * step, stride);
        simdgroup_multiply_accumulate(sums[2 * i], a, b[0], sums[2 * i]);
        simdgroup_multiply_accumulate(sums[2 * i + 1], a, b[1], sums[2 * i + 1]);
      }
    }
  }
}

}  // namespace billfish
