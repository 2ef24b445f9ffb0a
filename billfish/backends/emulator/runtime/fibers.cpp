#include "fibers.h"

#include "fault.h"
#include "memory.h"
#include "switch.h"
#include "system.h"

namespace emulator {

Threadgroup group;
Thread* self;
const Position* position;
Dispatch dispatch;

namespace {

// A little more than a power of two, or the same variable of all threads would fall into the same cache set.
constexpr unsigned long stack_size = (256 << 10) + 9 * 64;
constexpr unsigned long canary = 0x5AFEC0DE5AFEC0DE;

unsigned char* stacks;
void* scheduler;  // stack pointer of run_threadgroup while a fiber runs
Kernel kernel;
void** arguments;
unsigned long random_state;

unsigned long& stack_end(unsigned thread) { return *(unsigned long*)(stacks + thread * stack_size); }

struct Sequence {  // 0 .. count - 1 in the chosen order
  unsigned items[max_threads];

  Sequence(unsigned count, Order order) {
    for (unsigned i = 0; i < count; i++) items[i] = order == reverse ? count - 1 - i : i;
    if (order != random_order) return;
    for (unsigned i = count; i > 1; i--) {
      unsigned j = random_below(i), item = items[i - 1];
      items[i - 1] = items[j];
      items[j] = item;
    }
  }
};

bool runnable(const Thread& thread) {
  switch (thread.state) {
    case State::ready: return true;
    case State::at_simdgroup: return group.simdgroups[thread.position.simdgroup].completed >= thread.awaited;
    case State::at_threadgroup: return group.completed >= thread.awaited;
    case State::returned: return false;
  }
  return false;
}

// The lanes of one simdgroup, each once, as far as they do not wait for others.
struct Round {
  unsigned first, count, at;
  Sequence lanes;

  Round(unsigned simdgroup, Order order)
      : first(simdgroup * simd_width),
        count(dispatch.threads - first < simd_width ? dispatch.threads - first : simd_width),
        at(0),
        lanes(count, order) {}

  Thread* next() {
    while (at < count) {
      Thread& thread = group.threads[first + lanes.items[at++]];
      if (runnable(thread)) return &thread;
    }
    return nullptr;
  }
};
Round* current_round;

// Leaves `save` for a thread.
void resume(void** save, Thread& thread) {
  thread.state = State::ready;
  self = &thread;
  position = &thread.position;
  emulator_switch(save, thread.stack_pointer);
}

// Leaves the running thread for the next of the round. From one lane straight to another at the same place, so that the
// processor guesses the way back right: its memory of return addresses is the same for both.
void yield() {
  Thread& me = *self;
  if (!fault.kind && stack_end(me.position.index) != canary) {
    fault.kind = stack_overflow;
    fault.first = current(nullptr, false);
    set_detail("a thread uses more than 256 KiB of its own memory");
  }
  Thread* next = fault.kind ? nullptr : current_round->next();
  if (next) return resume(&me.stack_pointer, *next);
  self = nullptr;
  emulator_switch(&me.stack_pointer, scheduler);
}

bool complete(Simdgroup& simdgroup) {
  if (simdgroup.arrived == 0 || simdgroup.arrived != simdgroup.alive) return false;
  simdgroup.arrived = 0;
  simdgroup.completed++;
  return true;
}

void fiber_entry() {
  kernel(arguments);
  Simdgroup& simdgroup = group.simdgroups[self->position.simdgroup];
  simdgroup.alive--;
  group.alive--;
  // What the others wait for may be complete now that this lane will not come.
  complete(simdgroup);
  self->state = State::returned;
  self->operation = "the end of the kernel";
  self->site = nullptr;
  yield();
  __builtin_unreachable();
}

void wait(State state, unsigned awaited) {
  self->state = state;
  self->awaited = awaited;
  yield();
}

void make_fiber(unsigned index, Uint3 first) {
  Thread& thread = group.threads[index];
  Uint3 size = dispatch.threads_per_threadgroup;
  Uint3 inside{index % size.x, index / size.x % size.y, index / (size.x * size.y)};
  thread = Thread{};
  thread.position = Position{{first.x + inside.x, first.y + inside.y, first.z + inside.z},
                             inside, index, index % simd_width, index / simd_width};
  unsigned char* top = stacks + (index + 1) * stack_size - 256;
  void** frame = (void**)top - saved_words;
  __builtin_memset(frame, 0, saved_words * sizeof(void*));
  frame[return_word] = (void*)fiber_entry;
  thread.stack_pointer = frame;
  stack_end(index) = canary;
}

void make_fibers(Uint3 first) {
  group.alive = dispatch.threads;
  group.arrived = group.completed = 0;
  for (unsigned i = 0; i < dispatch.simdgroups; i++) {
    unsigned left = dispatch.threads - i * simd_width;
    Simdgroup& simdgroup = group.simdgroups[i];
    simdgroup.alive = left < simd_width ? left : simd_width;
    simdgroup.lanes = left < simd_width ? (1u << left) - 1 : ~0u;
    simdgroup.arrived = simdgroup.completed = 0;
  }
  for (unsigned i = 0; i < dispatch.threads; i++) make_fiber(i, first);
}

// Runs the lanes of one simdgroup until all of them wait for other simdgroups. In random order, sometimes not so long.
bool run_simdgroup(unsigned index, Order order) {
  bool any = false;
  while (!fault.kind) {
    Round lanes(index, order);
    Thread* first = lanes.next();
    if (!first) break;
    any = true;
    current_round = &lanes;
    resume(&scheduler, *first);
    if (order == random_order && random_below(4) == 0) break;
  }
  return any;
}

Party party(const Thread& thread) {
  return Party{1, thread.position.index, linear_threadgroup(), 0, thread.site, thread.operation};
}

// Nobody can go on. A lane that waits in a simdgroup operation waits for lanes of its own simdgroup; if there is none,
// threads wait at a barrier for threads that have returned.
void report_deadlock() {
  const Thread* waiting = nullptr;
  for (unsigned i = 0; i < dispatch.threads; i++) {
    const Thread& thread = group.threads[i];
    if (thread.state == State::at_simdgroup) waiting = &thread;
    if (thread.state == State::at_threadgroup && !waiting) waiting = &thread;
    if (thread.state == State::at_simdgroup) break;
  }
  bool simdgroup = waiting->state == State::at_simdgroup;
  fault.kind = simdgroup ? divergent_simdgroup : divergent_barrier;
  fault.first = party(*waiting);
  for (unsigned i = 0; i < dispatch.threads; i++) {
    const Thread& thread = group.threads[i];
    bool mate = !simdgroup || thread.position.simdgroup == waiting->position.simdgroup;
    if (!mate || thread.state == waiting->state) continue;
    fault.second = party(thread);
    break;
  }
}

void arrive_elsewhere(FaultKind kind, const char* operation, const void* site, const char* others, const void* there) {
  fault.kind = kind;
  fault.first = current(site, false, operation);
  for (unsigned i = 0; i < dispatch.threads; i++) {
    const Thread& thread = group.threads[i];
    if (&thread == self || thread.site != there || thread.operation != others) continue;
    if (thread.state == State::ready || thread.state == State::returned) continue;
    fault.second = party(thread);
    break;
  }
  abandon();
}

// The running lane comes to an operation of its simdgroup and waits for the rest. True for the last one, which does not wait.
bool arrive(Exchange& buffer, const char* operation, const void* site) {
  Simdgroup& simdgroup = group.simdgroups[self->position.simdgroup];
  self->operation = operation;
  self->site = site;
  if (simdgroup.arrived == 0) {
    simdgroup.operation = operation;
    simdgroup.site = site;
    buffer.lanes = 0;
  } else if (simdgroup.site != site) {
    arrive_elsewhere(divergent_simdgroup, operation, site, simdgroup.operation, simdgroup.site);
  }
  buffer.lanes |= 1u << self->position.lane;
  simdgroup.arrived++;
  unsigned awaited = simdgroup.completed + 1;
  if (complete(simdgroup)) return true;
  wait(State::at_simdgroup, awaited);
  return false;
}

}  // namespace

void seed(unsigned long value) { random_state = value * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D; }

unsigned random_below(unsigned bound) {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (unsigned)(random_state >> 33) % bound;
}

bool allocate_stacks() {
  if (stacks) return true;
  // Pages that no fiber touches cost nothing: the system gives them out on first use.
  // The first is nobody's: a thread that needs more than its own runs into the one before.
  unsigned char* memory = (unsigned char*)malloc(stack_size * (max_threads + 1) + 16);
  if (!memory) return false;
  stacks = memory + (-(unsigned long)memory & 15) + stack_size;
  return true;
}

bool on_stack(unsigned long address) { return address - (unsigned long)stacks < stack_size * max_threads; }

void run_threadgroup(Kernel function, void** with, Uint3 first, Order order) {
  kernel = function;
  arguments = with;
  make_fibers(first);
  while (group.alive && !fault.kind) {
    bool any = false;
    Sequence simdgroups(dispatch.simdgroups, order);
    for (unsigned i = 0; i < dispatch.simdgroups && !fault.kind; i++) any |= run_simdgroup(simdgroups.items[i], order);
    if (!any && !fault.kind) report_deadlock();
  }
}

void abandon() {
  yield();
  __builtin_unreachable();
}

void threadgroup_barrier(int flags, const void* site) {
  static const char* const name = "threadgroup_barrier";
  self->operation = name;
  self->site = site;
  if (group.arrived == 0) group.site = site;
  if (group.site != site) arrive_elsewhere(divergent_barrier, name, site, name, group.site);
  if (++group.arrived < dispatch.threads) {
    wait(State::at_threadgroup, group.completed + 1);
    return;
  }
  group.arrived = 0;
  group.completed++;
  after_threadgroup_barrier(flags);
}

const Exchange& exchange(const char* operation, const void* value, unsigned size, const void* site) {
  // Two buffers are enough: a lane can be one operation ahead of the slowest, but not two.
  Exchange& buffer = group.simdgroups[self->position.simdgroup].buffers[self->operations++ & 1];
  if (size) __builtin_memcpy(buffer.bytes[self->position.lane], value, size);
  arrive(buffer, operation, site);
  return buffer;
}

void simdgroup_barrier(int flags, const void* site) {
  static const char* const name = "simdgroup_barrier";
  Simdgroup& simdgroup = group.simdgroups[self->position.simdgroup];
  Exchange& buffer = simdgroup.buffers[self->operations++ & 1];
  bool last = arrive(buffer, name, site);
  unsigned missing = simdgroup.lanes & ~buffer.lanes;
  if (missing) report_inactive_lane(name, __builtin_ctz(missing), site);
  if (last) after_simdgroup_barrier(flags);  // before any lane goes on
}

void report_non_uniform(const char* operation, const char* argument, const void* site) {
  fault.kind = non_uniform;
  fault.first = current(site, false, operation);
  set_detail(argument);
  abandon();
}

void report_inactive_lane(const char* operation, unsigned lane, const void* site) {
  fault.kind = divergent_simdgroup;
  fault.first = current(site, false, operation);
  set_detail("lane %ld does not take part", lane);
  abandon();
}

}  // namespace emulator
