// Metal 4's tensors, and the product that tiles of gemm_tensor.metal are made of: 64 rows of x with 64 columns of y, a panel of 16
// for each of four simdgroups, however many k there are.
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

namespace billfish {

constexpr constant int UNIT_TILE = 64, UNIT_PANELS = UNIT_TILE / PANEL;
constexpr constant int UNIT_STRIDE = RUN + 8;  // numbers of a column in a slab: eight columns begin in different banks
constexpr constant int UNIT_SLAB = UNIT_TILE * UNIT_STRIDE;
constexpr constant mpp::tensor_ops::matmul2d_descriptor UNIT_PRODUCT = mpp::tensor_ops::matmul2d_descriptor(
    UNIT_TILE, UNIT_TILE, static_cast<int>(dynamic_extent), false, true, false,
    mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);

}  // namespace billfish
