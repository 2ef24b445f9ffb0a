#include "memory.h"

#include "fault.h"
#include "publication.h"
#include "system.h"

namespace emulator {

Counters counters;

namespace {

// How many threads an access stands for. All that is remembered of them is what a later access needs.
enum Threads : unsigned char { one, several_lanes_of_one_simdgroup, several_simdgroups };

Range* ranges;
unsigned range_count;
Range* last_range;
bool checking;
unsigned long code;
void* module_of_code;

// Time goes on at every barrier and fence. What was done before the last barrier on that memory is ordered before now.
unsigned clock_now;
unsigned last_barrier[2];
unsigned last_simdgroup_barrier[2][max_threads / simd_width];

unsigned long spins;

void* module_of(unsigned long address) {
  Dl_info info;
  return dladdr((void*)address, &info) ? info.dli_fbase : nullptr;
}

Range* find_range(unsigned long address) {
  if (last_range && address - last_range->address < last_range->size) return last_range;
  for (unsigned i = 0; i < range_count; i++)
    if (address - ranges[i].address < ranges[i].size) return last_range = &ranges[i];
  return nullptr;
}

[[noreturn]] void report(FaultKind kind, const Range* range, unsigned long address, unsigned size, bool writes,
                         const void* site) {
  fault.kind = kind;
  fault.range = range ? (int)(range - ranges) : -1;
  fault.offset = range ? (long)(address - range->address) : 0;
  fault.size = size;
  fault.first = current(site, writes);
  abandon();
}

[[noreturn]] void report_conflict(FaultKind kind, const Range* range, unsigned long address, unsigned size, bool writes,
                                  const void* site, const Access& before, bool before_writes) {
  fault.second = Party{1, before.thread, before.threadgroup - 1, before_writes, (void*)(code + before.site), nullptr};
  report(kind, range, address, size, writes, site);
}

// An address outside of all ranges: beside one of them, or nowhere near.
[[noreturn]] void report_outside(unsigned long address, unsigned size, bool writes, const void* site) {
  const Range* nearest = nullptr;
  unsigned long least = 0;
  for (unsigned i = 0; i < range_count; i++) {
    const Range& range = ranges[i];
    unsigned long end = range.address + range.size;
    unsigned long distance = address < range.address ? range.address - address : address - end;
    if (!nearest || distance < least) {
      nearest = &range;
      least = distance;
    }
  }
  report(out_of_bounds, nearest, address, size, writes, site);
}

bool in_margin(unsigned long address) {
  for (unsigned i = 0; i < range_count; i++) {
    const Range& range = ranges[i];
    if (address - (range.address - range.margin) < range.size + 2 * range.margin) return true;
  }
  return false;
}

// Whether an access of the same threadgroup comes before what the running thread does now, for all to see.
bool ordered(const Access& before, Space space) {
  const Position& me = self->position;
  if (before.clock < last_barrier[space]) return true;
  bool same_simdgroup = before.thread / simd_width == me.simdgroup;
  if (before.threads == several_simdgroups) return false;
  if (same_simdgroup && before.clock < last_simdgroup_barrier[space][me.simdgroup]) return true;
  return before.threads == one && before.thread == me.index;
}

struct Check {
  Range& range;
  unsigned long address;
  unsigned size;
  const void* site;
  Access now;

  // Faults if `before` and the access under way are in conflict; true if `before` is past, false if it is concurrent.
  bool past(const Access& before, bool before_writes, bool writes) const {
    if (!before.threadgroup) return true;
    bool harmless = (!before_writes && !writes) || (before.atomic && now.atomic);
    if (before.threadgroup != now.threadgroup) {
      if (range.space == threadgroup_space) return true;  // of an earlier threadgroup: gone
      if (harmless || known(before)) return true;
      report_conflict(cross_threadgroup, &range, address, size, writes, site, before, before_writes);
    }
    if (ordered(before, range.space)) return true;
    if (harmless) return false;
    report_conflict(race, &range, address, size, writes, site, before, before_writes);
  }

  bool written(const Cell& cell) const {
    if (range.space == threadgroup_space) return cell.write.threadgroup == now.threadgroup;
    return range.initialised || cell.write.threadgroup;
  }

  // `last` becomes the access under way, alone if `last` is past, else both together.
  void join(Access& last, bool past) const {
    if (last.threadgroup != now.threadgroup || past) {
      last = now;
      return;
    }
    bool same_simdgroup = last.thread / simd_width == now.thread / simd_width;
    unsigned char threads = last.threads;
    if (last.thread != now.thread && threads == one) threads = several_lanes_of_one_simdgroup;
    if (!same_simdgroup) threads = several_simdgroups;
    if (last.atomic || !now.atomic) last = now;  // a plain access is the one to remember
    last.threads = threads;
  }

  void read(Cell& cell) const {
    if (!written(cell)) report(uninitialised, &range, address, size, false, site);
    past(cell.write, true, false);
    join(cell.read, past(cell.read, false, false));
  }

  void write(Cell& cell) const {
    past(cell.read, false, true);
    join(cell.write, past(cell.write, true, true));
  }
};

void access(unsigned long address, unsigned size, bool reads, bool writes, bool atomic, const void* site) {
  if (!self || on_stack(address)) return;
  Range* range = find_range(address);
  if (!range) {
    if (!checking) return;
    // Tables in the program are the kernel's own; the margins of threadgroup variables lie in the same module.
    if (!in_margin(address) && module_of(address) == module_of_code) return;
    report_outside(address, size, writes, site);
  }
  unsigned width = size < 16 ? 31 - __builtin_clz(size) : 4;
  if (reads) {
    range->bytes_read += size;
    range->reads[width]++;
  }
  if (writes) {
    range->bytes_written += size;
    range->writes[width]++;
  }
  if (!checking) return;
  unsigned long offset = address - range->address;
  if (offset + size > range->size) report(out_of_bounds, range, address, size, writes, site);
  if (writes && !range->writable) report(read_only, range, address, size, writes, site);
  if (!range->cells) return;
  int where = (int)((long)site - (long)code);
  Access now{linear_threadgroup() + 1, clock_now, (unsigned short)self->position.index, atomic, one, where};
  Check check{*range, address, size, site, now};
  // The bytes of an access mostly have the same past, and then the same future.
  Cell* cells = range->cells + offset;
  const Cell before = cells[0];
  for (unsigned i = 0; i < size; i++) {
    if (i && !__builtin_memcmp(&cells[i], &before, sizeof(Cell))) {
      cells[i] = cells[0];
      continue;
    }
    if (reads) check.read(cells[i]);
    if (writes) check.write(cells[i]);
  }
}

void aligned_access(unsigned long address, unsigned size, bool writes, const void* site) {
  if (checking && address % size && self && !on_stack(address)) {
    const Range* range = find_range(address);
    if (range) report(misaligned, range, address, size, writes, site);
  }
  access(address, size, !writes, writes, false, site);
}

}  // namespace

unsigned linear_threadgroup() {
  const Uint3 &at = dispatch.threadgroup_position, &of = dispatch.threadgroups;
  return at.x + of.x * (at.y + of.y * at.z);
}

bool begin_memory(Range* list, unsigned count, bool checked, const void* kernel) {
  ranges = list;
  range_count = count;
  last_range = nullptr;
  checking = checked;
  code = (unsigned long)kernel;
  module_of_code = module_of(code);
  clock_now = 1;
  begin_publication();
  bool room = true;
  for (unsigned i = 0; i < count; i++) {
    Range& range = ranges[i];
    range.cells = nullptr;
    if (!checked || !range.writable) continue;
    range.cells = (Cell*)calloc(range.size + 1, sizeof(Cell));
    room &= range.cells != nullptr;
  }
  return room;
}

void end_memory() {
  for (unsigned i = 0; i < range_count; i++) free(ranges[i].cells);
  ranges = nullptr;
  range_count = 0;
  last_range = nullptr;
}

void begin_threadgroup() {
  clock_now++;
  last_barrier[device_space] = last_barrier[threadgroup_space] = clock_now;
  for (auto& space : last_simdgroup_barrier)
    for (unsigned& clock : space) clock = clock_now;
  spins = 0;
  begin_knowledge();
  for (unsigned i = 0; i < range_count; i++)
    if (ranges[i].space == threadgroup_space) __builtin_memset((void*)ranges[i].address, 0xFF, ranges[i].size);
}

void after_threadgroup_barrier(int flags) {
  counters.threadgroup_barriers++;
  spins = 0;
  clock_now++;
  share_knowledge(flags & device_memory);
  if (flags & device_memory) last_barrier[device_space] = clock_now;
  if (flags & threadgroup_memory) last_barrier[threadgroup_space] = clock_now;
}

void after_simdgroup_barrier(int flags) {
  counters.simdgroup_barriers++;
  clock_now++;
  unsigned simdgroup = self->position.simdgroup;
  if (flags & device_memory) last_simdgroup_barrier[device_space][simdgroup] = clock_now;
  if (flags & threadgroup_memory) last_simdgroup_barrier[threadgroup_space][simdgroup] = clock_now;
}

void device_fence(bool acquire, bool release) {
  clock_now++;
  fence(acquire, release, clock_now, last_barrier[device_space]);
}

void count_matrix_multiply() { counters.matrix_multiplies++; }

void reading(const void* address, unsigned size, const void* site) {
  access((unsigned long)address, size, true, false, false, site);
}

void writing(const void* address, unsigned size, const void* site) {
  access((unsigned long)address, size, false, true, false, site);
}

void atomic_access(const volatile void* address, unsigned size, bool reads, bool writes, const void* site) {
  constexpr unsigned long patience = 1 << 22;
  counters.atomics++;
  if (writes) spins = 0;
  if (++spins > patience) {
    fault.kind = endless;
    fault.first = current(site, writes);
    set_detail("%ld atomic loads in a row without a store or a barrier", patience);
    abandon();
  }
  access((unsigned long)address, size, reads, writes, true, site);
  if (checking) publish_atomic((unsigned long)address, reads, writes);
}

}  // namespace emulator

// What the compiler's thread sanitizer calls before each access. These are ours, not the sanitizer's own.
#define HOOK(n)                                                                                                        \
  extern "C" void __tsan_read##n(void* p) { emulator::aligned_access((unsigned long)p, n, false, EMULATOR_SITE); }     \
  extern "C" void __tsan_write##n(void* p) { emulator::aligned_access((unsigned long)p, n, true, EMULATOR_SITE); }     \
  extern "C" void __tsan_unaligned_read##n(void* p) { emulator::reading(p, n, EMULATOR_SITE); }                        \
  extern "C" void __tsan_unaligned_write##n(void* p) { emulator::writing(p, n, EMULATOR_SITE); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
#undef HOOK

extern "C" void __tsan_init() {}

extern "C" void* __tsan_memcpy(void* to, const void* from, unsigned long size) {
  emulator::reading(from, (unsigned)size, EMULATOR_SITE);
  emulator::writing(to, (unsigned)size, EMULATOR_SITE);
  return __builtin_memcpy(to, from, size);
}

extern "C" void* __tsan_memmove(void* to, const void* from, unsigned long size) {
  emulator::reading(from, (unsigned)size, EMULATOR_SITE);
  emulator::writing(to, (unsigned)size, EMULATOR_SITE);
  return __builtin_memmove(to, from, size);
}

extern "C" void* __tsan_memset(void* to, int value, unsigned long size) {
  emulator::writing(to, (unsigned)size, EMULATOR_SITE);
  return __builtin_memset(to, value, size);
}
