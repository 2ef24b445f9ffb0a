// Multiplies with the level amx and with avx512_vnni, both compiled against the emulated instructions beside this file, and prints every product in
// which any bit differs. test_levels.py compiles and runs it.
#include "matrices.h"

WITHOUT_THE_REST(avx512_vnni)
namespace amx {
extern const Level level;
}

int main() {
  int compared = 0, different = 0;
  for (const Kind& kind : KINDS)
    for (const int64_t k : {32, 96, 256, 544}) {
      if (k % CHUNK && chunk_scale_bytes(kind.scales) > 0) continue;  // k-quants come in whole chunks
      const Matrix matrix(kind, 50, k);
      if (wants_floats(matrix.weights)) continue;
      for (const int64_t m : {16, 17, 32, 33, 39, 64}) {
        std::vector<float> x(size_t(m * k));
        for (auto& value : x) value = float(random_below(200001) - 100000) / 50000;
        for (const int digits : {1, 2}) {
          const std::vector<float> expected = matrix.multiply(avx512_vnni::level, x, digits), got = matrix.multiply(amx::level, x, digits);
          compared++;
          if (std::memcmp(expected.data(), got.data(), got.size() * sizeof(float)) == 0) continue;
          different++;
          std::printf("%s, %d rows, k = %d, %d digits: other bits\n", kind.name, int(m), int(k), digits);
        }
      }
    }
  std::printf("%d products, %d differ\n", compared, different);
  return different > 0;
}
