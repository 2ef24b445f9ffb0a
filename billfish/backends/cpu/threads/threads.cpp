#include "threads/threads.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "threads/cores.h"
#include "threads/float_mode.h"
#include "threads/openmp.h"

namespace billfish {
namespace {

constexpr int MOST_THREADS = 1024;
constexpr auto SPIN = std::chrono::microseconds(300);

inline void pause() {
#if defined(__aarch64__)
  asm volatile("yield");
#elif defined(__x86_64__)
  asm volatile("pause");
#endif
}

// A thread that was woken often starts on the core of whoever woke it, which goes on working there, and a scheduler takes
// milliseconds to see that another core is idle. So it leaves that core itself.
#if defined(__linux__)
inline int current_core() { return sched_getcpu(); }
void leave_core(int core) {
  cpu_set_t all, others;
  if (core < 0 || sched_getcpu() != core || sched_getaffinity(0, sizeof all, &all) != 0) return;
  others = all;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}
#else
inline int current_core() { return -1; }
void leave_core(int) {}
#endif

class Pool {
 public:
  // Where the system gives fewer threads (a limit of a container, no memory for a stack), those that there are do the work of all: queues,
  // and with them the pieces, are the same. It is not asked again before another number is wanted.
  Pool(Pieces& pieces, int helpers) : pieces_(pieces) {
    workers_.reserve(size_t(helpers));
    try {
      for (int i = 1; i <= helpers; i++) workers_.emplace_back([this, i] { serve(size_t(i)); });
    } catch (const std::exception&) {
    }
  }

  ~Pool() {
    stop_.store(true);
    announce();
    for (auto& worker : workers_) worker.join();
  }

  // The caller works too, and leaves when every piece is done: it does not wait for threads that are still waking up.
  void run() {
    announce();
    pieces_.work(0);
    while (!pieces_.all_done()) pause();
  }

 private:
  void announce() {
    round_.fetch_add(1);  // sequentially consistent with sleepers_: one of the two sees the other
    if (sleepers_.load() != 0) {
      caller_core_.store(current_core());
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
  }

  void serve(size_t own) {
    const KnownFloats known;
    uint64_t seen = 0;
    for (;;) {
      seen = wait_for_round_after(seen);
      if (stop_.load()) return;
      pieces_.work(own);
    }
  }

  uint64_t wait_for_round_after(uint64_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < 64; i++) {
        const uint64_t round = round_.load(std::memory_order_acquire);
        if (round != seen) return round;
        pause();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return round_.load() != seen; });
    sleepers_.fetch_sub(1);
    lock.unlock();
    leave_core(caller_core_.load());
    return round_.load();
  }

  Pieces& pieces_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> sleepers_{0}, caller_core_{-1};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Never destroyed: at the end of the process, daemon threads of Python may still be in a loop, and helpers always wait for one.
struct State {
  std::atomic<bool> in_use{false};
  // Of whoever has set in_use:
  OpenMp openmp;  // whose threads are used, where there is one
  Pieces* pieces = nullptr;
  Pool* pool = nullptr;
  std::atomic<int> wanted{0};  // by set_threads; 0 for the usual number
  std::atomic<int> usual{0};   // 0 where it is to be found out
};

#if !defined(_WIN32)
void forget_in_child();
#endif

State& state() {
  static State& kept = []() -> State& {
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, forget_in_child);
#endif
    return *new State;
  }();
  return kept;
}

#if !defined(_WIN32)
// A child has none of its parent's threads: it forgets the pool (without joining what is not there) and makes its own, as OpenMP
// would wait for them. It may also have fewer cores.
void forget_in_child() {
  State& s = state();
  s.openmp = {}, s.pieces = nullptr, s.pool = nullptr;
  s.usual = 0;
  s.in_use = false;
}
#endif

struct Using {
  std::atomic<bool>& in_use;
  ~Using() { in_use = false; }
};

void drop_pool(State& s) {
  delete s.pool;
  s.pool = nullptr;
}

int find_usual() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  const int count = text ? std::atoi(text) : 0;
  return count > 0 ? std::min(count, MOST_THREADS) : available_cores();
}

}  // namespace

int default_threads() {
  State& s = state();
  if (s.usual == 0) s.usual = find_usual();
  return s.usual;
}

int threads() {
  const int count = state().wanted;
  return count > 0 ? count : default_threads();
}

void set_threads(int count) {
  State& s = state();
  if (count == 0) s.usual = find_usual();
  s.wanted = count;
}

void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body, int64_t least) {
  State& s = state();
  const int size = threads();
  if (size == 1 || count < 2 || s.in_use.exchange(true)) {
    if (count > 0) body(0, count);
    return;
  }
  const Using using_it{s.in_use};
  if (!s.pieces || int(s.pieces->threads()) != size) {
    drop_pool(s);
    delete s.pieces;
    s.pieces = nullptr;  // where the next line throws
    s.pieces = new Pieces(size);
  }
  s.pieces->begin(count, body, least);
  if (s.openmp) {
    s.openmp.run(*s.pieces);
  } else {
    if (!s.pool) s.pool = new Pool(*s.pieces, size - 1);
    s.pool->run();
  }
  s.pieces->rethrow();
}

bool share_threads_of(const std::string& library) {
  State& s = state();
  const OpenMp found = OpenMp::of(library);
  if (!found) return false;
  while (s.in_use.exchange(true)) pause();
  const Using using_it{s.in_use};
  drop_pool(s);
  s.openmp = found;
  return true;
}

}  // namespace billfish
