// Rounding, and the gates of feed-forward parts.
namespace billfish {

// A number in T. In float16 none becomes infinite: it is the largest one instead.
template <typename T>
METAL_FUNC T activation(float v) { return T(v); }
template <>
METAL_FUNC half activation<half>(float v) { return half(abs(v) > 65504.0f ? copysign(65504.0f, v) : v); }

// A number as y has it.
template <typename Y>
METAL_FUNC void store(device Y* y, long at, float v) { y[at] = Y(v); }

METAL_FUNC float sigmoid(float v) { return 1.0f / (1.0f + exp(-v)); }

// GATE of gate and up: 1 SiLU, 2 GELU by tanh, 3 gpt-oss's clamped SiLU.
template <int GATE>
METAL_FUNC float gated(float gate, float up) {
  if (GATE == 2) return gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate)) * up;
  if (GATE == 3) {
    const float g = min(gate, 7.0f);
    return g * sigmoid(1.702f * g) * (clamp(up, -7.0f, 7.0f) + 1.0f);
  }
  return gate * sigmoid(gate) * up;
}

}  // namespace billfish
