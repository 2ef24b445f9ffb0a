// marlin_probe_units: y [16, 16] = x [16, 16] @ w [16, 16].T in float, the smallest product that every version of matmul2d takes.
using Matrix = tensor<device T, dextents<int, 2>, tensor_inline>;
constexpr auto about = mpp::tensor_ops::matmul2d_descriptor(16, 16, 16, false, true);
Matrix left((device T*)x, dextents<int, 2>(16, 16)), right((device T*)w, dextents<int, 2>(16, 16));
mpp::tensor_ops::matmul2d<about, execution_simdgroup> units;
auto sums = units.template get_destination_cooperative_tensor<Matrix, Matrix, float>();
units.run(left, right, sums);
for (ushort i = 0; i < sums.get_capacity(); i++) {
  if (!sums.is_valid_element(i)) continue;
  const auto at = sums.get_multidimensional_index(i);  // column, row
  y[at[1] * 16 + at[0]] = sums[i];
}
