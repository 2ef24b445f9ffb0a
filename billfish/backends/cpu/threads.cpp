#include "threads.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace billfish {
namespace {

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
  explicit Pool(int helpers) {
    for (int i = 0; i < helpers; i++) workers_.emplace_back([this] { serve(); });
  }

  ~Pool() {
    stop_.store(true);
    announce();
    for (auto& worker : workers_) worker.join();
  }

  // The caller works too, and leaves when every piece is done: it does not wait for threads that are still waking up.
  void run(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    const int64_t all = int64_t(workers_.size()) + 1;
    const uint64_t pieces = std::min({count, PIECES * all, std::max(all, count / LEAST)});
    count_ = count;
    body_ = &body;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(pieces, std::memory_order_release);
    announce();
    work();
    while (done_.load(std::memory_order_acquire) != pieces) pause();
  }

 private:
  // More pieces than threads, so that a slow one takes fewer; but none so small that drawing it would show.
  static constexpr int64_t PIECES = 16, LEAST = 4;

  void announce() {
    round_.fetch_add(1);  // sequentially consistent with sleepers_: one of the two sees the other
    if (sleepers_.load() != 0) {
      caller_core_.store(current_core());
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
  }

  // A ticket holds the number of the next piece and how many there are: (next << 32) | pieces. Whoever draws a valid
  // one knows from it alone that its round is not over, so that count_ and body_ are still that round's.
  void work() {
    for (;;) {
      const uint64_t ticket = ticket_.fetch_add(uint64_t(1) << 32, std::memory_order_acq_rel);
      const int64_t piece = int64_t(ticket >> 32), pieces = int64_t(ticket & 0xffffffff);
      if (piece >= pieces) return;
      (*body_)(count_ * piece / pieces, count_ * (piece + 1) / pieces);
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      seen = wait_for_round_after(seen);
      if (stop_.load()) return;
      work();
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

  std::vector<std::thread> workers_;
  std::atomic<uint64_t> round_{0}, ticket_{0}, done_{0};
  std::atomic<int> sleepers_{0}, caller_core_{-1};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  int64_t count_ = 0;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
};

std::mutex in_use;
std::unique_ptr<Pool> pool;
int pool_size = 0;
std::atomic<int> wanted{0};

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    int count = std::atoi(text);
    if (count > 0) return count;
  }
#if defined(__linux__)
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return std::max(1, CPU_COUNT(&cores));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// A child has none of its parent's threads: it forgets the pool (without joining what is not there) and makes its own.
void forget_in_child() {
  pool.release();
  pool_size = 0;
  new (&in_use) std::mutex;
}

}  // namespace

int threads() {
  int count = wanted.load();
  return count > 0 ? count : default_threads();
}

void set_threads(int count) { wanted.store(count); }

void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
  (void)registered;
  std::unique_lock<std::mutex> lock(in_use, std::try_to_lock);
  const int size = threads();
  if (!lock.owns_lock() || size == 1 || count < 2) {
    if (count > 0) body(0, count);
    return;
  }
  if (pool_size != size) {
    pool = std::make_unique<Pool>(size - 1);
    pool_size = size;
  }
  pool->run(count, body);
}

}  // namespace billfish
