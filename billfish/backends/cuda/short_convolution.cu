// y = c * convolution(b * x): two gates around a causal convolution. A thread has a channel of some rows. FEW: what is behind each row goes to its own place
// in `states`, of which the first is where the sequence begins.
//
// Compiled with TYPE, TAPS and FEW.
#include "convolution.cuh"

// bcx [rows][3][channels].
extern "C" __global__ void marlin_short_convolution(const u16* bcx, const float* __restrict__ weight, const float* __restrict__ bias, const u64* states,
                                                    const int4* chunks, u16* y, int channels, int tail_at) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  float taps[TAPS];
  if (channel < channels) load_taps(taps, weight, channel, channels);
  const float added = bias && channel < channels ? __ldg(bias + channel) : 0;
  let_next_start();
  const Rows rows = rows_of(chunks, blockIdx.y);
  wait_for_previous();
  if (channel >= channels || rows.count <= 0) return;
  float* tail = (float*)states[rows.text] + tail_at + channel;
  const auto part = [&](int row, int which) { return TYPE::to_float(bcx[((size_t)row * 3 + which) * channels + channel]); };
  const auto input = [&](int row) { return part(row, 0) * part(row, 2); };
  Window window;
  window.load(rows.first, rows.start, tail, channels, input);
  for (int row = rows.first; row < rows.first + rows.count; row++) {
    window.push(input(row));
    y[(size_t)row * channels + channel] = (u16)TYPE::pack_finite(part(row, 1) * window.sum(taps, added), 0);
    if (FEW) window.store((float*)states[row] + tail_at + channel, channels);
  }
}
