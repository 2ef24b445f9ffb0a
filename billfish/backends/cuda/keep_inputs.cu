// A sequence keeps the last inputs of a convolution, and so do its checkpoints; behind rows of a prompt. A thread has a channel of a sequence.
//
// Compiled with TYPE, TAPS and PAIRS (1: an input is the product of two numbers, as of a gate).
#define FEW 0
#include "convolution.cuh"

// ranges [texts]: a sequence's first chunk, and how many it has. saves [chunks]: where the state behind a chunk goes, or 0.
extern "C" __global__ void marlin_keep_inputs(const u16* in, const u16* others, const u64* states, const int4* chunks,
                                              const int2* ranges, const u64* saves, int stride, int channels, int tail_at) {
  let_next_start();
  wait_for_previous();
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int2 range = ranges[blockIdx.y];
  if (channel >= channels || range.y == 0) return;
  float* own = (float*)states[blockIdx.y] + tail_at + channel;
  const auto input = [&](int row) {
    const float x = TYPE::to_float(in[(size_t)row * stride + channel]);
    return PAIRS ? x * TYPE::to_float(others[(size_t)row * stride + channel]) : x;
  };
  Window window;
  const int start = chunks[range.x].w;
  for (int i = range.x; i < range.x + range.y; i++)  // checkpoints first: they may need inputs that the last store overwrites
    if (const u64 save = saves[i]; save) {
      window.load(chunks[i].x + chunks[i].y, start, own, channels, input);
      window.store((float*)save + tail_at + channel, channels);
    }
  const int4 last = chunks[range.x + range.y - 1];
  window.load(last.x + last.y, start, own, channels, input);
  window.store(own, channels);
}
