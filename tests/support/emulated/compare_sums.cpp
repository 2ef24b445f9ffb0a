// Adds up blocks of a level with the largest and with random codes and x, as kernels do, and prints what is not the exact sum: levels add
// in 16 bits where that cannot overflow. test_levels.py compiles this for each level of x86, against the emulated instructions.
#include <cstdio>
#include <random>
#include <vector>

#include "layout/problem.h"
#include BILLFISH_SIMD
#include "gemm/sums8.h"
#include "layout/prepack.h"

namespace BILLFISH_ISA {

std::mt19937 source(1);
int random_from(int low, int high) { return low + int(source() % uint32_t(high - low + 1)); }
int checked = 0, wrong = 0;

// Each of the 32 x or codes: the least, the largest, or anything between.
enum class Fill { least, largest, any };
int number(Fill fill, int low, int high) { return fill == Fill::least ? low : fill == Fill::largest ? high : random_from(low, high); }

// value(code) is what dot() is to multiply, for codes from low to high.
template <class Decoder, int HALVES, class Value> void check(Codes kind, const uint8_t* table, int low, int high, Value value) {
  using P = Piece<Decoder, 1, 1, HALVES == 2 ? Reach::half : Reach::block, true, 0, 2>;
  for (const Fill weights : {Fill::least, Fill::largest, Fill::any})
    for (const Fill digits : {Fill::least, Fill::largest, Fill::any}) {
      std::vector<uint8_t> codes(TILE_ROWS * billfish::CHUNK), block(Decoder::block_bytes);
      for (auto& code : codes) code = uint8_t(number(weights, low, high));
      billfish::BlockPacker{codes.data(), ROW_VECTORS, LANES}.pack(kind, uint32_t(HIGH_FLIP), block.data());
      int8_t x[32];
      for (auto& digit : x) digit = int8_t(number(digits, -128, 127));
      int32_t starts[2 * 2];
      for (auto& start : starts) start = random_from(-100000, 100000);
      float scale[2], totals[3];
      const Activations8 all{x, scale, nullptr, totals, nullptr, starts, 0, 1, 1, 1, 1, 1, nullptr, nullptr};
      const BlockOfX<P> x_block(all, 0, 0);
      unroll<HALVES>([&](auto half) {
        typename P::Sums sum;
        sum_block<P, decltype(half)::value, false>(block.data(), table, x_block, sum);
        P::each([&](auto t, auto r) {
          for (int lane = 0; lane < LANES; lane++) {
            int expected = starts[half * 2 + r], got = sum[t][0][r].v.template get<int32_t>(lane);
            if (P::in_place(r)) got -= sum[t][0][0].v.template get<int32_t>(lane) - starts[half * 2];
            const uint8_t* row = codes.data() + (r * LANES + lane) * billfish::CHUNK;
            for (int k = half * 32 / HALVES; k < (half + 1) * 32 / HALVES; k++) expected += (P::in_place(r) ? 16 : 1) * value(row[k]) * x[k];
            checked++, wrong += got != expected;
            if (got != expected) std::printf("codes %d, half %d of %d, row %d: %d, not %d\n", int(kind), int(half), HALVES, lane, got, expected);
          }
        });
      });
    }
}

template <class Decoder> void check_unsigned(Codes kind, int largest) {
  const auto itself = [](int code) { return code; };
  check<Decoder, 1>(kind, nullptr, 0, largest, itself), check<Decoder, 2>(kind, nullptr, 0, largest, itself);
}
template <class Decoder> void check_looked_up(Codes kind, int lowest, int highest, int bias) {
  uint8_t table[16];
  for (int i = 0; i < 16; i++) table[i] = uint8_t(lowest + (highest - lowest) * i / 15 + bias);
  const auto value = [&](int code) { return lowest + (highest - lowest) * code / 15 + bias; };
  check<Decoder, 1>(kind, table, 0, 15, value), check<Decoder, 2>(kind, table, 0, 15, value);
}

void check_all() {
  check_unsigned<Twos>(Codes::u2, 3), check_unsigned<Threes>(Codes::u3, 7), check_unsigned<Nibbles>(Codes::u4, 15);
  check_unsigned<Fives>(Codes::u5, 31), check_unsigned<Sixes>(Codes::u6, 63);
  check_looked_up<Looked>(Codes::table, -127, 127, SIGNED_BIAS);
  if constexpr (SMALL_TABLES) check_looked_up<SmallLooked>(Codes::small_table, -billfish::SMALL_BIAS, billfish::SMALL_BIAS - 1, billfish::SMALL_BIAS);
  check<Whole, 1>(Codes::s8, nullptr, SIGNED_BIAS - 128, SIGNED_BIAS + 127, [](int code) { return SIGNED_BIAS ? code : int8_t(code); });
}

}  // namespace BILLFISH_ISA

int main() {
  BILLFISH_ISA::check_all();
  std::printf("%d sums, %d wrong\n", BILLFISH_ISA::checked, BILLFISH_ISA::wrong);
  return BILLFISH_ISA::wrong > 0;
}
