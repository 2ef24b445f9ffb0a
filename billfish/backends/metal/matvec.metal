// Few rows of x: each weight is read from memory once and multiplied with all of them, in float, by the lane that decodes it.
//
// A simdgroup has one panel of 16 columns. A lane has COLUMNS of them, side by side, and shares them with 2 * COLUMNS - 1 other
// lanes, which have other k. The simdgroups of a threadgroup have the same panel and other k, and add up at the end.
namespace billfish {

// COUNT numbers of x; from the `left`-th on they are zeros. K is a multiple of 4.
template <int COUNT, typename T>
METAL_FUNC void load_numbers(const device T* from, int left, thread T* to) {
  if (left >= COUNT) {
    #pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const Four<T> four = *(const device Four<T>*)(from + i);
      #pragma unroll
      for (int j = 0; j < 4; j++) to[i + j] = four.v[j];
    }
  } else {
    #pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = i < left ? from[i] : T(0);
  }
}

// COUNT words at once, a power of two, from the i-th on.
template <int COUNT>
METAL_FUNC void load_words(WordsAt from, int i, thread uint* to) {
  if (COUNT == 1) {
    to[0] = from[i];
  } else {
    using Vector = vec<uint, COUNT == 1 ? 2 : COUNT>;
    const Vector all = ((const device Vector*)from.base)[uint(from.at + i) / COUNT];
    #pragma unroll
    for (int j = 0; j < COUNT; j++) to[j] = all[j];
  }
}

// The words of a run in COLUMNS columns, and those of their further bits, 16 bytes at a time.
template <int COLUMNS, typename W>
struct Runs {
  static constexpr constant int run_words = W::Element::run_words, high_words = W::Element::high_words;
  uint words[COLUMNS * run_words];
  uint high[COLUMNS * high_words + 1];

  METAL_FUNC void fetch(W w, int run, int column) thread {
    constexpr int width = run_words < 4 ? run_words : 4;
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      #pragma unroll
      for (int i = 0; i < run_words; i += width) load_words<width>(w.words(run, column + c), i, words + c * run_words + i);
    }
    if (high_words != 0) {
      constexpr int all = COLUMNS * high_words, most = all < 4 ? all : 4, step = most < 1 ? 1 : most;
      #pragma unroll
      for (int i = 0; i < all; i += step) load_words<step>(w.high_words(run, column), i, high + i);
    }
  }
  METAL_FUNC Part part(int c, int i) const thread {
    return W::Element::part((const thread uint*)words + c * run_words, (const thread uint*)high + c * high_words, i);
  }
};

// ---- one run, added to products [halves][ROWS][COLUMNS]

// One or two rows: x stays in registers for all columns, and codes are multiplied as they are, those of each place by
// themselves. What is to be subtracted or added for each weight is so for the sum of x, which `x_sums` [halves][ROWS] collects.
template <int ROWS, int COLUMNS, typename T, typename W>
METAL_FUNC void multiply_raw(const device T* x, int m, W w, thread const Runs<COLUMNS, W>& runs, int k0, thread float* products,
                             thread float* x_sums) {
  constexpr int places = W::Element::places, halves = W::halves;
  T xs[ROWS * RUN];
  #pragma unroll
  for (int r = 0; r < ROWS; r++) load_numbers<RUN>(x + (min(r, m - 1) * w.k + k0), w.k - k0, xs + r * RUN);
  if (W::subtracts || W::adds) {
    #pragma unroll
    for (int i = 0; i < ROWS * RUN; i++) x_sums[i % RUN / (RUN / halves) * ROWS + i / RUN] += float(xs[i]);
  }
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    float placed[halves * ROWS * places] = {0};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const Part part = runs.part(c, i);
      #pragma unroll
      for (int t = 0; t < 4; t++) {
        const half2 pair = W::Element::pair(part, t);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
          thread float& sum = placed[(t / 2 % halves * ROWS + r) * places + W::Element::place(t)];
          sum = fma(float(pair.x), float(xs[r * RUN + 8 * t + 2 * i]), sum);
          sum = fma(float(pair.y), float(xs[r * RUN + 8 * t + 2 * i + 1]), sum);
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < halves * ROWS; i++) {
      float sum = placed[i * places];
      #pragma unroll
      for (int p = 1; p < places; p++) {
        sum = fma(placed[i * places + p], W::Element::unit(p) / W::Element::unit(0), sum);
      }
      products[i * COLUMNS + c] = fma(sum, W::Element::unit(0), products[i * COLUMNS + c]);
    }
  }
}

// More rows: x comes for 8 k at a time, and each weight is finished but for its scale.
template <int ROWS, int COLUMNS, typename T, typename W>
METAL_FUNC void multiply_finished(const device T* x, int m, W w, thread const Runs<COLUMNS, W>& runs, int k0,
                                  thread const Group* groups, thread float* products) {
  const device T* rows[ROWS];
  #pragma unroll
  for (int r = 0; r < ROWS; r++) rows[r] = x + (min(r, m - 1) * w.k + k0);
  #pragma unroll
  for (int t = 0; t < 4; t++) {
    T xs[ROWS * 8];
    #pragma unroll
    for (int r = 0; r < ROWS; r++) load_numbers<8>(rows[r] + 8 * t, w.k - k0 - 8 * t, xs + r * 8);
    const int h = t / 2 % W::halves;
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const Group group = groups[h * COLUMNS + c];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        float2 v = float2(W::Element::pair(runs.part(c, i), t));
        if (W::adds) {
          v = fma(v, float2(W::Element::unit(t) * group.scale), float2(group.minimum));
        } else if (W::subtracts || W::Element::places > 1) {
          v = fma(v, float2(W::Element::unit(t)), float2(-group.zero));
        }
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
          thread float& sum = products[(h * ROWS + r) * COLUMNS + c];
          sum = fma(v.x, float(xs[r * 8 + 2 * i]), sum);
          sum = fma(v.y, float(xs[r * 8 + 2 * i + 1]), sum);
        }
      }
    }
  }
}

// Weights one by one, as the reference has them, added to sums [ROWS][COLUMNS]: where x has an infinity, what offsets add for the
// sum of x would be inf - inf. Words are read again, as registers have no index.
template <int ROWS, int COLUMNS, typename T, typename W>
METAL_FUNC void add_plainly(const device T* x, int m, W w, int run, int column, thread const Group* groups, thread float* sums) {
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    #pragma nounroll
    for (int i = 0; i < 4; i++) {
      const Part part = W::Element::part(w.words(run, column + c), w.high_words(run, column + c), i);
      #pragma unroll
      for (int t = 0; t < 4; t++) {
        const float2 v = W::weights(W::Element::pair(part, t), t, groups[t / 2 % W::halves * COLUMNS + c]);
        const int k = run * RUN + 8 * t + 2 * i;
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const device T* pair = x + (min(r, m - 1) * w.k + k);
          if (k < w.k) sums[r * COLUMNS + c] = fma(v.y, float(pair[1]), fma(v.x, float(pair[0]), sums[r * COLUMNS + c]));
        }
      }
    }
  }
}

METAL_FUNC bool is_number(float v) { return (as_type<uint>(v) & 0x7F800000u) != 0x7F800000u; }

// ---- all of them

// sums [ROWS][COLUMNS] of x rows times the first panel of w, for the k of this lane and this simdgroup, which is `part` of `parts`.
template <int ROWS, int COLUMNS, typename T, typename W>
METAL_FUNC void sum_panel(const device T* x, int m, W w, int part, int parts, int lane, thread float* sums) {
  constexpr int lanes = 2 * COLUMNS, halves = W::halves;
  constexpr int group_runs = W::group_k > RUN ? W::group_k / RUN : 1;
  constexpr bool raw = ROWS <= 2, scaled = !raw && W::adds, summed = raw && (W::subtracts || W::adds);
  const int column = lane / lanes * COLUMNS;
  Group groups[halves * COLUMNS] = {};
  if (W::group_k == 0) {  // one lane reads what all of them need
    if (lane % lanes == 0) w.template groups<COLUMNS>(0, column, groups);
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const ushort owner = lane / lanes * lanes;
      groups[c] = {simd_shuffle(groups[c].scale, owner), simd_shuffle(groups[c].zero, owner),
                   simd_shuffle(groups[c].minimum, owner)};
    }
  }
  for (int group = part * lanes + lane % lanes; group * group_runs < w.runs(); group += parts * lanes) {
    if (W::group_k != 0) w.template groups<COLUMNS>(group * group_runs, column, groups);
    float products[halves * ROWS * COLUMNS] = {0}, x_sums[halves * ROWS] = {0};
    const int end = min((group + 1) * group_runs, w.runs());
    for (int run = group * group_runs; run < end; run++) {
      Runs<COLUMNS, W> runs;
      runs.fetch(w, run, column);
      if (raw) {
        multiply_raw<ROWS, COLUMNS>(x, m, w, runs, run * RUN, products, x_sums);
      } else {
        multiply_finished<ROWS, COLUMNS>(x, m, w, runs, run * RUN, groups, products);
      }
    }
    if (summed) {
      bool numbers = true;
      #pragma unroll
      for (int i = 0; i < halves * ROWS; i++) numbers = numbers && is_number(x_sums[i]);
      if (!numbers) {
        for (int run = group * group_runs; run < end; run++) add_plainly<ROWS, COLUMNS>(x, m, w, run, column, groups, sums);
        continue;
      }
    }
    #pragma unroll
    for (int i = 0; i < halves * ROWS * COLUMNS; i++) {
      const int h = i / (ROWS * COLUMNS), r = i / COLUMNS % ROWS, c = i % COLUMNS;
      const Group g = groups[h * COLUMNS + c];
      thread float& sum = sums[r * COLUMNS + c];
      float product = products[i];
      if (scaled) {
        sum += product;
        continue;
      }
      if (!raw && !W::subtracts && W::Element::places == 1) product *= W::Element::unit(0);
      if (raw && W::subtracts) product = fma(-g.zero, x_sums[h * ROWS + r], product);
      sum = fma(product, g.scale, sum);
      if (W::adds) sum = fma(g.minimum, x_sums[h * ROWS + r], sum);
    }
  }
}

// One of these sums, over all simdgroups.
template <int ROWS>
METAL_FUNC float total_of(const threadgroup float* scratch, int i, int parts) {
  float sum = scratch[i];
  for (int p = 1; p < parts; p++) sum += scratch[p * ROWS * PANEL + i];
  return sum;
}

// The sums of all lanes and simdgroups, added up in their order, to y [m, n] with the bias, rounded once. `scratch` is for
// ROWS * 16 floats of each simdgroup. With a GATE, eight columns of gate and eight of up alternate, and y is [m, n / 2].
template <int ROWS, int COLUMNS, bool HAS_BIAS, int GATE, typename T, typename B>
METAL_FUNC void store_panel(thread float* sums, threadgroup float* scratch, device T* y, const device B* bias, int m, int n,
                            int panel, int part, int parts, int lane) {
  constexpr int lanes = 2 * COLUMNS;
  #pragma unroll
  for (int i = 0; i < ROWS * COLUMNS; i++) {
    #pragma unroll
    for (ushort step = 1; step < lanes; step *= 2) sums[i] += simd_shuffle_xor(sums[i], step);
    if (lane % lanes == 0) scratch[(part * ROWS + i / COLUMNS) * PANEL + lane / lanes * COLUMNS + i % COLUMNS] = sums[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (GATE != 0) {
    for (int i = part * 32 + lane; i < m * PANEL / 2; i += parts * 32) {
      const int row = i / (PANEL / 2), within = i % (PANEL / 2), first = panel * PANEL + within;
      if (first < n) {
        float gate = total_of<ROWS>(scratch, row * PANEL + within, parts), up = total_of<ROWS>(scratch, row * PANEL + PANEL / 2 + within, parts);
        if (HAS_BIAS) gate += float(bias[first]), up += float(bias[first + PANEL / 2]);
        y[long(row) * (n / 2) + panel * (PANEL / 2) + within] = activation<T>(gated<GATE>(gate, up));
      }
    }
    return;
  }
  for (int i = part * 32 + lane; i < m * PANEL; i += parts * 32) {
    const int column = panel * PANEL + i % PANEL;
    if (column < n) {
      const float sum = total_of<ROWS>(scratch, i, parts);
      y[long(i / PANEL) * n + column] = T(HAS_BIAS ? sum + float(bias[column]) : sum);
    }
  }
}

// Both.
template <int ROWS, int COLUMNS, bool HAS_BIAS, int GATE = 0, typename T, typename W, typename Y, typename B>
METAL_FUNC void multiply_panel(const device T* x, int m, W w, int panel, int part, int parts, int lane,
                               threadgroup float* scratch, device Y* y, const device B* bias) {
  float sums[ROWS * COLUMNS] = {0};
  sum_panel<ROWS, COLUMNS>(x, m, w.from(panel), part, parts, lane, sums);
  store_panel<ROWS, COLUMNS, HAS_BIAS, GATE>(sums, scratch, y, bias, m, w.n, panel, part, parts, lane);
}

}  // namespace billfish
