// Few rows of x: each weight is read from memory once and multiplied with all of them, in float, by the lane that decodes it.
//
// A simdgroup has one panel of 16 columns. A lane has COLUMNS of them, side by side, and shares them with 2 * COLUMNS - 1 other
// lanes, which have other k. The simdgroups of a threadgroup have the same panel and other k, and add up at the end. A row of y is
// summed in the same order beside any number of other rows, so it has the same bits.
namespace billfish {

// Number i of 16 bytes.
template <typename T>
METAL_FUNC T number_of(uint4 words, int i) { return as_type<vec<T, 2>>(words[i / 2])[i % 2]; }
template <>
METAL_FUNC float number_of<float>(uint4 words, int i) { return as_type<float>(words[i]); }

// ROWS rows of x [m, k]; those that are not there are the last one. Several are at multiples of 16 bytes.
template <int ROWS, typename T>
struct Rows {
  static constexpr constant int wide = sizeof(T) == 2 ? 8 : 4;  // numbers in 16 bytes
  const device T* rows[ROWS];

  // xs [ROWS][wide] from k on.
  METAL_FUNC void load(int k, thread T* xs) const thread {
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (ROWS > 1) {
        const uint4 words = *(const device uint4*)(rows[r] + k);
        #pragma unroll
        for (int i = 0; i < wide; i++) xs[r * wide + i] = number_of<T>(words, i);
      } else {
        #pragma unroll
        for (int i = 0; i < wide; i += 4) {
          const Four<T> four = *(const device Four<T>*)(rows[r] + k + i);
          #pragma unroll
          for (int j = 0; j < 4; j++) xs[i + j] = four.v[j];
        }
      }
    }
  }
};

// Row r of a lane is another one in each of the lanes that add up: of the rows that both of two lanes have, each keeps the first half and
// passes the second on, without asking which half that is. See total_lanes.
template <int ROWS>
METAL_FUNC int row_of(int r, int lane) {
  if (ROWS == 8) return r ^ ((lane & 1) << 2 | (lane & 2) | (lane & 4) >> 2);
  return ROWS == 4 ? r ^ ((lane & 1) << 1 | (lane & 2) >> 1) : ROWS == 2 ? r ^ (lane & 1) : r;
}

template <int ROWS, typename T>
METAL_FUNC Rows<ROWS, T> rows_of(const device T* x, int m, int k, int lane) {
  Rows<ROWS, T> all;
  #pragma unroll
  for (int r = 0; r < ROWS; r++) all.rows[r] = x + min(row_of<ROWS>(r, lane), m - 1) * k;
  return all;
}

// Whether all rows of x [m, k] begin at a multiple of 16 bytes: MLX hands contiguous slices over as they are, at any offset.
template <typename T>
METAL_FUNC bool has_aligned_rows(const device T* x, int k) {
  return ((reinterpret_cast<ulong>(x) | ulong(k * int(sizeof(T)))) & 15) == 0;
}

// COUNT words at once, a power of two, from the i-th on.
template <int COUNT>
METAL_FUNC void load_words(WordsAt from, int i, thread uint* to) {
  if (COUNT == 1) {
    to[0] = from[i];
  } else {
    using Vector = vec<uint, COUNT == 1 ? 2 : COUNT>;
    const Vector all = *(const device Vector*)(from.base + from.at + i);
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
    const WordsAt first = w.words_of_four(run, column, 0);
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      #pragma unroll
      for (int i = 0; i < run_words; i += width) load_words<width>(first, 4 * c * run_words + i, words + c * run_words + i);
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

// ---- one run

// Groups of some columns as `unscaled` takes them: where W::scaled, `minimum` is what a weight has beside its code, by unit(0).
template <int COLUMNS, typename W>
METAL_FUNC void load_groups(W w, int run, int column, thread Group* groups) {
  w.template groups<COLUMNS>(run, column, groups);
  #pragma unroll
  for (int i = 0; i < W::halves * COLUMNS; i++) {
    const float one = W::Element::unit(0);
    if (W::scaled) groups[i].minimum = W::adds ? groups[i].minimum / one : -groups[i].zero / one * groups[i].scale;
  }
}

// Pair t of a column: weights, but for unit(0) where W::scaled, else for their scale.
template <typename W>
METAL_FUNC float2 unscaled(half2 pair, int t, Group group) {
  const float unit = W::Element::unit(t);
  if (W::scaled) return fma(float2(pair), float2(unit / W::Element::unit(0) * group.scale), float2(group.minimum));
  return W::subtracts ? fma(float2(pair), float2(unit), float2(-group.zero)) : float2(pair);
}

// What weights lack where they are not W::scaled: products [ROWS][COLUMNS] of a group go to sums, and begin again.
template <int ROWS, int COLUMNS>
METAL_FUNC void scale_products(const thread Group* groups, thread float* products, thread float* sums) {
  #pragma unroll
  for (int i = 0; i < ROWS * COLUMNS; i++) {
    sums[i] = fma(products[i], groups[i % COLUMNS].scale, sums[i]);
    products[i] = 0.0f;
  }
}

// The weights of k0 + 8t to k0 + 8t + 7, times x, added to sums [ROWS][COLUMNS].
template <int ROWS, int COLUMNS, typename T, typename W>
METAL_FUNC void multiply_eight(Rows<ROWS, T> x, thread const Runs<COLUMNS, W>& runs, int k0, int t,
                               const thread Group* groups, thread float* sums) {
  constexpr int wide = Rows<ROWS, T>::wide;
  #pragma unroll
  for (int first = 0; first < 8; first += wide) {
    T xs[ROWS * wide];
    x.load(k0 + 8 * t + first, xs);
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      #pragma unroll
      for (int i = 0; i < wide / 2; i++) {
        const float2 v = unscaled<W>(W::Element::pair(runs.part(c, first / 2 + i), t), t, groups[c]);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
          thread float& sum = sums[r * COLUMNS + c];
          sum = fma(v.x, float(xs[r * wide + 2 * i]), sum);
          sum = fma(v.y, float(xs[r * wide + 2 * i + 1]), sum);
        }
      }
    }
  }
}

// The same for a run that ends behind K: words are read again, as registers have no index. K is a multiple of 4.
template <int ROWS, int COLUMNS, typename T, typename W>
METAL_FUNC void multiply_rest(thread const Rows<ROWS, T>& x, W w, int run, int column, int t, const thread Group* groups,
                              thread float* sums) {
  #pragma nounroll
  for (int i = 0; i < 4; i++) {
    const int k = run * RUN + 8 * t + 2 * i;
    if (k >= w.k) break;
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const Part part = W::Element::part(w.words_of_four(run, column, c), w.high_words(run, column + c), i);
      const float2 v = unscaled<W>(W::Element::pair(part, t), t, groups[c]);
      #pragma unroll
      for (int r = 0; r < ROWS; r++) {
        thread float& sum = sums[r * COLUMNS + c];
        sum = fma(v.x, float(x.rows[r][k]), sum);
        sum = fma(v.y, float(x.rows[r][k + 1]), sum);
      }
    }
  }
}

// ---- all of them

// sums [ROWS][COLUMNS] of x times the first panel of w, but for unit(0), for the k of this lane and this simdgroup, which is `part` of
// `parts`. Rows are in the order of row_of.
template <int ROWS, int COLUMNS, typename T, typename W>
METAL_FUNC void sum_panel(thread const Rows<ROWS, T>& x, W w, int part, int parts, int lane, thread float* sums) {
  constexpr int lanes = 2 * COLUMNS, halves = W::halves;
  constexpr int group_runs = W::group_k > RUN ? W::group_k / RUN : 1;
  const int column = lane / lanes * COLUMNS;
  Group groups[halves * COLUMNS] = {};
  if (W::group_k == 0) {  // one lane reads what all of them need
    if (lane % lanes == 0) load_groups<COLUMNS>(w, 0, column, groups);
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const ushort owner = lane / lanes * lanes;
      groups[c] = {simd_shuffle(groups[c].scale, owner), simd_shuffle(groups[c].zero, owner),
                   simd_shuffle(groups[c].minimum, owner)};
    }
  }
  for (int group = part * lanes + lane % lanes; group * group_runs < w.runs(); group += parts * lanes) {
    if (W::group_k != 0) load_groups<COLUMNS>(w, group * group_runs, column, groups);
    float products[ROWS * COLUMNS] = {0};
    thread float* const added = W::scaled ? sums : products;
    const int end = min((group + 1) * group_runs, w.runs());
    for (int run = group * group_runs; run < end; run++) {
      const bool whole = (run + 1) * RUN <= w.k;
      const int k0 = ROWS > 1 ? run * RUN : 0;  // one row takes one pointer along; several share an index
      Rows<ROWS, T> here = x;
      if (ROWS == 1) here.rows[0] += run * RUN;
      Runs<COLUMNS, W> runs;
      if (whole) runs.fetch(w, run, column);
      #pragma unroll
      for (int h = 0; h < halves; h++) {
        const thread Group* own = groups + h * COLUMNS;
        #pragma unroll
        for (int t = h * 4 / halves; t < (h + 1) * 4 / halves; t++) {
          if (whole) {
            multiply_eight<ROWS, COLUMNS, T, W>(here, runs, k0, t, own, added);
          } else {
            multiply_rest<ROWS, COLUMNS>(x, w, run, column, t, own, added);
          }
        }
        if (!W::scaled && halves == 2) scale_products<ROWS, COLUMNS>(own, products, sums);
      }
    }
    if (!W::scaled && halves == 1) scale_products<ROWS, COLUMNS>(groups, products, sums);
  }
}

// sums [ROWS][COLUMNS] of each of `lanes` neighbours, a power of two: their totals are shared out. Returns which of them a lane has, from
// that one on and in sums[0] to sums[max(ROWS * COLUMNS / lanes, 1) - 1]. Lanes are added up in one order for any ROWS.
template <int ROWS, int COLUMNS>
METAL_FUNC int total_lanes(thread float* sums, int lanes, int lane) {
  int first = 0, left = ROWS * COLUMNS;
  #pragma unroll
  for (ushort step = 1; step < lanes; step *= 2) {
    if (left == 1) {
      sums[0] += simd_shuffle_xor(sums[0], step);
      continue;
    }
    const bool upper = lane & step;
    left /= 2;
    first += upper ? left : 0;
    #pragma unroll
    for (int i = 0; i < left; i++) {
      if (left >= COLUMNS) {  // whole rows: those that the other lane keeps are behind those that this one keeps
        sums[i] += simd_shuffle_xor(sums[i + left], step);
        continue;
      }
      const float low = sums[i], high = sums[i + left];
      sums[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, step);
    }
  }
  return first;
}

// One of these sums, over all simdgroups.
template <int ROWS>
METAL_FUNC float total_of(const threadgroup float* scratch, int i, int parts) {
  float sum = scratch[i];
  for (int p = 1; p < parts; p++) sum += scratch[p * ROWS * PANEL + i];
  return sum;
}

// The sums of all lanes and simdgroups, added up in their order, times `unit`, to y [m, n] with the bias, rounded once. `scratch` is
// for ROWS * 16 floats of each simdgroup. With a GATE, eight columns of gate and eight of up alternate, and y is [m, n / 2].
template <int ROWS, int COLUMNS, bool HAS_BIAS, int GATE, typename T, typename B>
METAL_FUNC void store_panel(thread float* sums, float unit, threadgroup float* scratch, device T* y, const device B* bias, int m,
                            int n, int panel, int part, int parts, int lane) {
  constexpr int lanes = 2 * COLUMNS, own = ROWS * COLUMNS > lanes ? ROWS * COLUMNS / lanes : 1;
  const int first = total_lanes<ROWS, COLUMNS>(sums, lanes, lane);
  const int at = (part * ROWS + first / COLUMNS) * PANEL + lane / lanes * COLUMNS + first % COLUMNS;
  #pragma unroll
  for (int i = 0; i < own; i++) {
    if (lane % lanes < ROWS * COLUMNS) scratch[at + i] = sums[i] * unit;  // more lanes have the same
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
  sum_panel<ROWS, COLUMNS>(rows_of<ROWS>(x, m, w.k, lane), w.from(panel), part, parts, lane, sums);
  const float unit = W::scaled || !W::subtracts ? W::Element::unit(0) : 1.0f;
  store_panel<ROWS, COLUMNS, HAS_BIAS, GATE>(sums, unit, scratch, y, bias, m, w.n, panel, part, parts, lane);
}

}  // namespace billfish
