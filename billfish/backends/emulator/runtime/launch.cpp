// The C interface that runtime.py calls.
#include "fault.h"
#include "fibers.h"
#include "memory.h"
#include "system.h"

namespace emulator {

Fault fault;

Party current(const void* site, bool writes, const char* operation) {
  return Party{1, self->position.index, linear_threadgroup(), writes, site, operation};
}

void set_detail(const char* text, long number) {
  char* out = fault.detail;
  char* end = out + sizeof fault.detail - 24;
  for (; *text && out < end; text++) {
    if (__builtin_strncmp(text, "%ld", 3)) {
      *out++ = *text;
      continue;
    }
    char digits[20];
    int count = 0;
    do digits[count++] = '0' + number % 10;
    while (number /= 10);
    while (count) *out++ = digits[--count];
    text += 2;
  }
  *out = 0;
}

namespace {

struct Request {
  Kernel kernel;
  void** arguments;
  Range* ranges;
  unsigned range_count;
  Uint3 grid, threadgroup;
  unsigned order;
  unsigned seed;
  unsigned checked;
  unsigned flush;  // subnormal numbers to zero
  unsigned most;   // threadgroups that run, spread over the grid; 0: all
};

// The floating-point control register, with the bits set that make the processor flush subnormal numbers to zero.
#if defined(__aarch64__)
typedef unsigned long FloatControl;
FloatControl get_control() {
  FloatControl value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_control(FloatControl value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
constexpr FloatControl flush_bits = 1ul << 24;
#else
typedef unsigned FloatControl;
FloatControl get_control() {
  FloatControl value;
  asm volatile("stmxcsr %0" : "=m"(value));
  return value;
}
void set_control(FloatControl value) { asm volatile("ldmxcsr %0" ::"m"(value)); }
constexpr FloatControl flush_bits = 1u << 15 | 1u << 6;
#endif

unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

void run_grid(const Request& request) {
  Uint3 grid = request.grid, most = request.threadgroup;
  Uint3 groups{(grid.x + most.x - 1) / most.x, (grid.y + most.y - 1) / most.y, (grid.z + most.z - 1) / most.z};
  dispatch.grid = grid;
  dispatch.threadgroups = groups;
  unsigned total = groups.x * groups.y * groups.z;
  unsigned* sequence = (unsigned*)malloc((total + 1) * sizeof(unsigned));
  for (unsigned i = 0; i < total; i++) sequence[i] = request.order == reverse ? total - 1 - i : i;
  for (unsigned i = total; request.order == random_order && i > 1; i--) {
    unsigned j = random_below(i), item = sequence[i - 1];
    sequence[i - 1] = sequence[j];
    sequence[j] = item;
  }
  unsigned long runs = request.most ? least(request.most, total) : total;
  for (unsigned i = 0; i < runs && !fault.kind; i++) {
    unsigned index = sequence[i * (unsigned long)total / runs];
    Uint3 at{index % groups.x, index / groups.x % groups.y, index / (groups.x * groups.y)};
    Uint3 first{at.x * most.x, at.y * most.y, at.z * most.z};
    Uint3 size{least(most.x, grid.x - first.x), least(most.y, grid.y - first.y), least(most.z, grid.z - first.z)};
    dispatch.threadgroup_position = at;
    dispatch.threads_per_threadgroup = size;
    dispatch.threads = size.x * size.y * size.z;
    dispatch.simdgroups = (dispatch.threads + simd_width - 1) / simd_width;
    begin_threadgroup();
    run_threadgroup(request.kernel, request.arguments, first, (Order)request.order);
  }
  free(sequence);
}

}  // namespace
}  // namespace emulator

extern "C" int emulator_launch(const emulator::Request* request) {
  using namespace emulator;
  fault = Fault{};
  fault.range = -1;
  counters = Counters{};
  if (!allocate_stacks()) return -1;
  seed(request->seed);
  bool room = begin_memory(request->ranges, request->range_count, request->checked, (void*)request->kernel);
  FloatControl control = get_control();
  if (request->flush) set_control(control | flush_bits);
  if (room) run_grid(*request);
  set_control(control);
  end_memory();
  return room ? fault.kind : -1;
}

extern "C" const emulator::Fault* emulator_fault() { return &emulator::fault; }
extern "C" const emulator::Counters* emulator_counters() { return &emulator::counters; }
