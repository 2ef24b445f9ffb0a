// Multiplies with the level avx512_vnni, compiled against the emulated instructions beside this file, and with the portable one, and
// prints every product in which they differ by more than float32 sums may, or whose rows have other bits than alone. test_levels.py compiles and runs
// it.
#include "matrices.h"

WITHOUT_THE_REST(portable)
WITHOUT_THE_REST(avx512_vnni)

// Whether a row of x in so many digits gets the same bits alone and beside others.
bool alike(const Matrix& matrix, const Level& level, const std::vector<float>& x, int digits) {
  const Weights& w = matrix.weights;
  const int64_t m = int64_t(x.size()) / w.k;
  if (is_plain(w) || w.codes == Codes::e4m3 || w.codes == Codes::floats) return true;  // these take x as it is
  const std::vector<float> together = matrix.multiply(level, x, digits);
  for (int64_t row = 0; row < m; row++) {
    const std::vector<float> alone = matrix.multiply(level, {x.begin() + row * w.k, x.begin() + (row + 1) * w.k}, digits);
    if (std::memcmp(alone.data(), together.data() + row * w.n, size_t(w.n) * sizeof(float))) return false;
  }
  return true;
}

int main() {
  int compared = 0, different = 0;
  for (const Kind& kind : KINDS)
    for (const int64_t k : {256, 544}) {
      if (k % CHUNK && chunk_scale_bytes(kind.scales) > 0) continue;  // k-quants come in whole chunks
      const Matrix matrix(kind, 50, k);
      for (const int64_t m : {1, 2, 3, 4, 7, 8, 9, 12, 16, 17, 33}) {
        std::vector<float> x(size_t(m * k));
        for (auto& value : x) value = float(random_below(200001) - 100000) / 50000;
        for (size_t i = 0; i < x.size(); i += 97) x[i] = 1e-9f;  // a third of the blocks are wide
        for (const Level* level : {&portable::level, &avx512_vnni::level})
          for (const int digits : {1, 2}) {
            compared++;
            if (alike(matrix, *level, x, digits)) continue;
            different++;
            std::printf("%s, %d rows, k = %d, %d digits, level %s: other bits than alone\n", kind.name, int(m), int(k), digits, level == &portable::level ? "portable" : "avx512_vnni");
          }
        for (const int digits : {0, 1, 2}) {
          const std::vector<float> expected = matrix.multiply(portable::level, x, digits), got = matrix.multiply(avx512_vnni::level, x, digits);
          float largest = 0, off = 0;
          for (size_t i = 0; i < got.size(); i++) largest = std::max(largest, std::abs(expected[i])), off = std::max(off, std::abs(got[i] - expected[i]));
          compared++;
          if (off <= 4e-6f * largest) continue;
          different++;
          std::printf("%s, %d rows, k = %d, %d digits: off by %g of %g\n", kind.name, int(m), int(k), digits, off, largest);
        }
      }
    }
  std::printf("%d products, %d differ\n", compared, different);
  return different > 0;
}
