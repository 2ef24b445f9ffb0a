// dequant_*: W [N, K] in T, bit for bit as the reference has it. A thread for each run; grid (runs, N).
using namespace billfish;
const int n = size[0], k = size[1];
const int run = thread_position_in_grid.x, column = thread_position_in_grid.y;
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, k).from(column / PANEL);
using W = decltype(weights<GROUP>(codes, high, scales, offsets, factor, n, k));
if (run < w.runs() && column < n) {
  const int within = column % PANEL;
  Group groups[W::halves];
  w.template groups<1>(run, within, groups);
  for (int i = 0; i < 4; i++) {
    const Part part = W::Element::part(w.words(run, within), w.high_words(run, within), i);
    for (int t = 0; t < 4; t++) {
      const float2 v = W::weights(W::Element::pair(part, t), t, groups[t / 2 % W::halves]);
      const int at = run * RUN + 8 * t + 2 * i;
      if (at < k) {
        y[long(column) * k + at] = T(v.x);
        y[long(column) * k + at + 1] = T(v.y);
      }
    }
  }
}
