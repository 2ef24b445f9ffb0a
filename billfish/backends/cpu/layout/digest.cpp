#include "layout/digest.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "threads/threads.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace billfish {
namespace {

constexpr int64_t PIECE = 1 << 16;  // bytes: the digest is made of those of pieces, whoever makes them
constexpr int VECTORS = 4;          // of two words, which are added up on their own
constexpr int64_t STRIPE = 16 * VECTORS;

// Odd, with about as many ones as zeros: the fractions of the golden ratio and of the square root of 3.
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15, ROOT = 0xbb67ae8584caa73b;

// Two words, and for each of them the product of its halves, by the instruction that every machine has for it.
typedef uint64_t Words __attribute__((vector_size(16)));
inline Words halves_product(Words w) {
#if defined(__x86_64__)
  const __m128i v = reinterpret_cast<__m128i>(w);
  return reinterpret_cast<Words>(_mm_mul_epu32(v, _mm_srli_epi64(v, 32)));
#elif defined(__aarch64__)
  const uint64x2_t v = reinterpret_cast<uint64x2_t>(w);
  return reinterpret_cast<Words>(vmull_u32(vmovn_u64(v), vshrn_n_u64(v, 32)));
#else
  return (w & 0xffffffff) * (w >> 32);
#endif
}

// Words are added up, which no change of a single one survives; and so are products of their halves, of which every place in a piece has
// its own key, so that the order counts, and one change does not make up for another.
struct Lanes {
  Words sums[VECTORS] = {}, products[VECTORS] = {}, keys[VECTORS];

  Lanes() {
    for (int i = 0; i < VECTORS; i++) keys[i] = Words{uint64_t(2 * i + 1), uint64_t(2 * i + 2)} * ROOT;
  }
  void add_stripe(const uint8_t* bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) {
      Words words;
      std::memcpy(&words, bytes + 16 * i, 16);
      sums[i] += words;
      products[i] += halves_product(words ^ keys[i]);
      keys[i] += GOLDEN;
    }
  }
};

// Another result for each state and for each word, and each of their bits reaches all of its bits.
inline uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word ^ word >> 32) * GOLDEN;
  state = (state ^ state >> 29) * ROOT;
  return state ^ state >> 32;
}

uint64_t digest_piece(const uint8_t* bytes, int64_t count) {
  Lanes lanes;
  int64_t at = 0;
  for (; at + STRIPE <= count; at += STRIPE) lanes.add_stripe(bytes + at);
  if (at < count) {
    uint8_t rest[STRIPE] = {};  // zeros behind the end: how many bytes there are goes into the whole
    std::copy(bytes + at, bytes + count, rest);
    lanes.add_stripe(rest);
  }
  uint64_t result = 0;
  for (int i = 0; i < VECTORS; i++)
    for (int j = 0; j < 2; j++) result = mix(mix(result, lanes.sums[i][j]), lanes.products[i][j]);
  return result;
}

}  // namespace

uint64_t digest(const uint8_t* bytes, int64_t count) {
  std::vector<uint64_t> pieces(size_t((count + PIECE - 1) / PIECE));
  parallel_for(int64_t(pieces.size()), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) pieces[size_t(i)] = digest_piece(bytes + i * PIECE, std::min(PIECE, count - i * PIECE));
  });
  uint64_t result = mix(0, uint64_t(count));
  for (const uint64_t piece : pieces) result = mix(result, piece);
  return result;
}

}  // namespace billfish
