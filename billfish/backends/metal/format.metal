// The axes of one format, put together.
namespace billfish {

template <int GROUP, typename S, typename O>
METAL_FUNC Weights<$ELEMENT, $SCALE, GROUP, S, O> weights(const device uint* codes, const device uint* high,
                                                          const device S* scales, const device O* offsets, float factor,
                                                          int n, int k) {
  return {codes, high, scales, offsets, factor, n, k};
}

}  // namespace billfish
