// marlin_embed_*: y [rows, K] in T: rows of the table W [N, K], one for each token. A thread for each run; grid (runs, rows).
using namespace billfish;
const int n = size[0], k = size[1];
const int run = thread_position_in_grid.x, row = thread_position_in_grid.y;
using W = decltype(weights<GROUP>(codes, high, scales, offsets, factor, n, k));
if (row < count[0]) {
  const int column = clamp(int(tokens[row]), 0, n - 1);
  const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, k).from(column / PANEL);
  if (run < w.runs()) {
    const int within = column % PANEL;
    Group groups[W::halves];
    w.template groups<1>(run, within, groups);
    for (int i = 0; i < 4; i++) {
      const Part part = W::Element::part(w.words(run, within), w.high_words(run, within), i);
      for (int t = 0; t < 4; t++) {
        const float2 v = W::weights(W::Element::pair(part, t), t, groups[t / 2 % W::halves]);
        const int at = run * RUN + 8 * t + 2 * i;
        if (at < k) {
          y[long(row) * k + at] = T(v.x);
          y[long(row) * k + at + 1] = T(v.y);
        }
      }
    }
  }
}
