// <metal_simdgroup_matrix>: 8x8 matrices, two neighbouring elements of a row in each lane.
#pragma once

namespace metal {

// Which elements a lane holds: (row, column) and (row, column + 1). Apple does not document it; MLX's kernels rely on it.
// As bits of the lane number, row = 4 2 1 and column = 3 0 with a zero appended.
EMULATOR_UNSEEN constexpr uint fragment_row(uint lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }
EMULATOR_UNSEEN constexpr uint fragment_column(uint lane) { return (lane >> 1 & 4) | (lane << 1 & 2); }
EMULATOR_UNSEEN constexpr uint fragment_lane(uint row, uint column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column >> 1 & 1);
}

template <class T, int columns = 8, int rows = 8> struct simdgroup_matrix {
  static_assert(columns == 8 && rows == 8, "Metal has 8x8 simdgroup matrices only");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint row = fragment_row(current_lane()), column = fragment_column(current_lane());
    elements[0] = row == column ? diagonal : T(0);
    elements[1] = row == column + 1 ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int columns, int rows> inline simdgroup_matrix<T, columns, rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, columns, rows> out;
  out.elements[0] = out.elements[1] = value;
  return out;
}

EMULATOR_UNSEEN inline void need_all_lanes(const emulator::Exchange& all, const char* name, const void* site) {
  if (~all.lanes) emulator::report_inactive_lane(name, __builtin_ctz(~all.lanes), site);
}

// What all lanes must agree on.
struct MatrixAddress {
  const void* pointer;
  ulong elements_per_row, x, y;
  bool transpose;

  EMULATOR_UNSEEN void check(const emulator::Exchange& all, const char* name, const void* site) const {
    need_all_lanes(all, name, site);
    MatrixAddress first = all.get<MatrixAddress>(0);
    if (first.pointer != pointer) emulator::report_non_uniform(name, "the pointer", site);
    if (first.elements_per_row != elements_per_row) emulator::report_non_uniform(name, "elements_per_row", site);
    if (first.x != x || first.y != y) emulator::report_non_uniform(name, "matrix_origin", site);
    if (first.transpose != transpose) emulator::report_non_uniform(name, "transpose_matrix", site);
  }
  EMULATOR_UNSEEN ulong offset(int i) const {  // of the lane's element i
    ulong row = fragment_row(current_lane()), column = fragment_column(current_lane()) + i;
    return transpose ? (y + column) * elements_per_row + x + row : (y + row) * elements_per_row + x + column;
  }
};

#ifndef EMULATOR_LINT
template <class T>
METAL_SIMD void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source, ulong elements_per_row = 8,
                               ulong2 matrix_origin = ulong2{0, 0}, bool transpose_matrix = false) {
  MatrixAddress v{source, elements_per_row, matrix_origin[0], matrix_origin[1], transpose_matrix};
  METAL_EXCHANGE("simdgroup_load");
  v.check(all, "simdgroup_load", EMULATOR_SITE);
  for (int i = 0; i < 2; i++) {
    const T* from = source + v.offset(i);
    emulator::reading(from, sizeof(T), EMULATOR_SITE);
    matrix.elements[i] = *from;
  }
}

template <class T>
METAL_SIMD void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, T* destination, ulong elements_per_row = 8,
                                ulong2 matrix_origin = ulong2{0, 0}, bool transpose_matrix = false) {
  MatrixAddress v{destination, elements_per_row, matrix_origin[0], matrix_origin[1], transpose_matrix};
  METAL_EXCHANGE("simdgroup_store");
  v.check(all, "simdgroup_store", EMULATOR_SITE);
  for (int i = 0; i < 2; i++) {
    T* to = destination + v.offset(i);
    emulator::writing(to, sizeof(T), EMULATOR_SITE);
    *to = matrix.elements[i];
  }
}
#endif

// d = a b + c in float, k after k, rounded once to d's type.
template <class D, class A, class B, class C>
METAL_SIMD void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  struct Operands {
    vec<A, 2> a;
    vec<B, 2> b;
  };
  Operands v{a.elements, b.elements};
  METAL_EXCHANGE("simdgroup_multiply_accumulate");
  need_all_lanes(all, "simdgroup_multiply_accumulate", EMULATOR_SITE);
  uint lane = current_lane(), row = fragment_row(lane), column = fragment_column(lane);
  if (lane == 0) emulator::count_matrix_multiply();
  float left = (float)c.elements[0], right = (float)c.elements[1];
  for (uint k = 0; k < 8; k++) {
    float of_a = (float)all.get<Operands>(fragment_lane(row, k)).a[k & 1];
    vec<B, 2> of_b = all.get<Operands>(fragment_lane(k, column)).b;
    left += of_a * (float)of_b[0];
    right += of_a * (float)of_b[1];
  }
  d.elements[0] = (D)left;
  d.elements[1] = (D)right;
}

template <class D, class A, class B>
inline __attribute__((always_inline)) void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d,
                                                              const simdgroup_matrix<A, 8, 8>& a,
                                                              const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal
