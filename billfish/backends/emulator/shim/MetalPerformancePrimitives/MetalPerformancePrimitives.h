// Metal 4's matmul2d: a reference of what Apple's header says of it. Products of tensors in memory, sums in a cooperative tensor.
#pragma once
#include <metal_tensor>

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;

  constexpr matmul2d_descriptor(int m, int n, int k = (int)metal::dynamic_extent, bool transpose_left = false,
                                bool transpose_right = false, bool relaxed_precision = false, mode matmul_mode = mode::multiply)
      : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right),
        relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
};

template <matmul2d_descriptor about, class Scope> struct matmul2d {
  static constexpr int threads = Scope::simdgroups * emulator::simd_width;
  static_assert(about.m % 8 == 0 && about.n % 8 == 0 && (about.m % 16 == 0 || about.n % 16 == 0),
                "matmul2d: M and N must be multiples of 8, and one of them of 16");

  template <class Left, class Right, class E>
  metal::cooperative_tensor<E, about.n, about.m, threads> get_destination_cooperative_tensor() const {
    return {};
  }

#ifdef EMULATOR_LINT
  template <class Left, class Right, class Destination> void run(Left&, Right&, Destination&) const;
#else
  // What all lanes must agree on.
  struct Operands {
    const void *left, *right;
    int sizes[4], strides[4];
  };

  // All threads of the scope come here. Sums beyond the rows and columns of the operands are nobody's.
  template <class Left, class Right, class Destination>
  EMULATOR_CONVERGENT EMULATOR_UNSEEN void run(Left& left, Right& right, Destination& destination) const {
    static_assert(metal::is_same_v<typename Left::element_type, typename Right::element_type>,
                  "matmul2d: half and bfloat cannot be mixed");
    static const char* const name = "matmul2d::run";
    if (threads > 32 && threads != (int)emulator::dispatch.threads)
      emulator::report_non_uniform(name, "the number of simdgroups", EMULATOR_SITE);
    Operands v{left.data, right.data, {left.extent(0), left.extent(1), right.extent(0), right.extent(1)},
               {left.strides[0], left.strides[1], right.strides[0], right.strides[1]}};
    const emulator::Exchange& all = emulator::exchange(name, &v, sizeof v, EMULATOR_SITE);
    metal::need_all_lanes(all, name, EMULATOR_SITE);
    if (__builtin_memcmp(&v, all.bytes[0], sizeof v)) emulator::report_non_uniform(name, "an operand", EMULATOR_SITE);

    const int k = about.k == -1 ? left.extent(about.transpose_left) : about.k;
    if (about.k == -1 && k != right.extent(!about.transpose_right))
      emulator::report_non_uniform(name, "K of left and right", EMULATOR_SITE);
    const int rows = metal::min(about.m, left.extent(!about.transpose_left));
    const int columns = metal::min(about.n, right.extent(about.transpose_right));
    read(left, about.transpose_left ? rows : k, about.transpose_left ? k : rows, EMULATOR_SITE);
    read(right, about.transpose_right ? k : columns, about.transpose_right ? columns : k, EMULATOR_SITE);
    for (int i = 0; i < Destination::capacity; i++) {
      const int column = Destination::place(i) % about.n, row = Destination::place(i) / about.n;
      const bool there = row < rows && column < columns;
      float sum = about.matmul_mode == matmul2d_descriptor::mode::multiply ? 0.0f : (float)destination.elements[i];
      for (int j = 0; there && j < k; j++) {
        sum += (float)*(about.transpose_left ? left.at(row, j) : left.at(j, row)) *
               (float)*(about.transpose_right ? right.at(j, column) : right.at(column, j));
      }
      destination.elements[i] = there ? sum : __builtin_nanf("");
    }
  }

  // Nobody knows which thread reads what. Here two read each number: one of them has not written it.
  template <class Tensor> EMULATOR_UNSEEN static void read(const Tensor& t, int columns, int rows, const void* site) {
    const int own = threads == 32 ? emulator::position->lane : emulator::position->index;
    for (int other = 0; other < 2; other++) {
      for (int i = (own + other * (threads / 2 + 1)) % threads; i < columns * rows; i += threads)
        emulator::reading(t.at(i % columns, i / columns), sizeof(typename Tensor::element_type), site);
    }
  }
#endif
};

}  // namespace tensor_ops
}  // namespace mpp
