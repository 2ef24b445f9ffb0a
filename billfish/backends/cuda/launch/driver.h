// The few functions of NVIDIA's driver that launching takes, found in its library at run time: nothing of CUDA is needed to compile this.
#pragma once
#include <cstdint>

namespace billfish::cuda {

// As cuda.h declares them, which keeps them as they are.
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    unsigned cluster[3];
    int serialization;
    char all[64];
  } value;
};
constexpr int CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct Driver {
  int (*launch)(const LaunchConfig*, void* function, void** arguments, void** extra);
  int (*encode_tiled)(TensorMap*, int type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                      const uint32_t* element_strides, int interleave, int swizzle, int promotion, int fill);
  int (*get_current)(void** context);
  int (*set_current)(void* context);
  int (*error_name)(int error, const char** name);
};

// The driver; throws std::runtime_error where there is none.
const Driver& driver();

}  // namespace billfish::cuda
