// The threads that loops run on, and the callers whose loops they share.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "threads/float_mode.h"
#include "threads/openmp.h"
#include "threads/pieces.h"

namespace billfish {

// A thread that was woken often starts on the core of whoever woke it, which goes on working there, and a scheduler takes
// milliseconds to see that another core is idle. So it leaves that core itself.
#if defined(__linux__)
inline int current_core() { return sched_getcpu(); }
inline void leave_core(int core) {
  cpu_set_t all, others;
  if (core < 0 || sched_getcpu() != core || sched_getaffinity(0, sizeof all, &all) != 0) return;
  others = all;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}
#else
inline int current_core() { return -1; }
inline void leave_core(int) {}
#endif

// Callers and helpers. Each caller takes a seat for its loop and works on that alone. Helpers draw pieces of all loops that go on, and of up to
// MOST_SEATS callers and helpers no more are at work than `threads`: with each further caller one helper fewer has work, so that two callers on
// two threads have a core each, and two on sixteen have seven helpers each. A loop ends when its pieces are done, whether helpers came or not.
class Team {
 public:
  // With an OpenMP library, one caller at a time has its threads, and there are no helpers.
  // Where the system gives fewer threads (a limit of a container, no memory for a stack), those that there are do the work of all: queues,
  // and with them the pieces, are the same. It is not asked again before another number is wanted.
  Team(int threads, const OpenMp& openmp) : threads_(threads), openmp_(openmp) {
    for (int i = 0; i < (openmp ? 1 : std::min(threads, MOST_SEATS)); i++) seats_.push_back(std::make_unique<Seat>(threads));
    if (openmp) return;
    asleep_ = std::vector<std::atomic<bool>>(size_t(threads));
    helpers_.reserve(size_t(threads) - 1);
    try {
      for (int i = 1; i < threads; i++) helpers_.emplace_back([this, i] { help(size_t(i)); });
    } catch (const std::exception&) {
    }
  }

  ~Team() {
    stop_.store(true);
    round_.fetch_add(1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    for (auto& helper : helpers_) helper.join();
  }

  int threads() const { return threads_; }

  // See parallel_for. False where all seats are taken: nothing was done then.
  bool run(int64_t count, const std::function<void(int64_t, int64_t)>& body, int64_t least) {
    for (const auto& seat : seats_) {
      if (seat->taken.load(std::memory_order_relaxed) || seat->taken.exchange(true)) continue;
      const Leaving leaving{*seat};
      seat->pieces.begin(count, body, least);
      if (openmp_) {
        openmp_.run(seat->pieces);
      } else {
        announce();
        seat->pieces.work(0);
      }
      seat->pieces.wait();
      return true;
    }
    return false;
  }

 private:
  static constexpr int MOST_SEATS = 8;
  static constexpr auto LINGER = std::chrono::milliseconds(50);  // more than is between two tokens of a language model

  using Moment = std::chrono::steady_clock::time_point;

  struct Seat {
    explicit Seat(int threads) : pieces(threads) {}
    std::atomic<bool> taken{false};
    std::atomic<Moment> empty_from{Moment::min()};  // when the seat begins to count as empty, if it is not taken
    alignas(64) Pieces pieces;
  };

  struct Leaving {
    Seat& seat;
    ~Leaving() {
      seat.empty_from.store(std::chrono::steady_clock::now() + LINGER, std::memory_order_relaxed);
      seat.taken.store(false);
    }
  };

  // A caller is soon back with its next loop, and helpers must not come and go with each. So a seat counts for LINGER more.
  int wanted_helpers() const {
    const Moment now = std::chrono::steady_clock::now();
    int callers = 0;
    for (const auto& seat : seats_) {
      const bool taken = seat->taken.load(std::memory_order_relaxed);
      callers += taken || now < seat->empty_from.load(std::memory_order_relaxed);
    }
    return threads_ - std::max(callers, 1);
  }

  // Helpers 1 to wanted_helpers() are those that come.
  void announce() {
    round_.fetch_add(1);  // sequentially consistent with asleep_: one of the two sees the other
    const int wanted = wanted_helpers();
    if (std::none_of(asleep_.begin() + 1, asleep_.begin() + 1 + wanted, [](const auto& asleep) { return asleep.load(); })) return;
    caller_core_.store(current_core());
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  void help(size_t own) {
    const KnownFloats known;
    for (uint64_t seen = 0;;) {
      seen = wait_for_round_after(seen, int(own));
      if (stop_.load()) return;
      std::array<Seat*, MOST_SEATS> going_on;
      size_t loops = 0;
      for (const auto& seat : seats_)
        if (seat->taken.load(std::memory_order_acquire)) going_on[loops++] = seat.get();
      for (size_t i = 0; i < loops; i++) going_on[(own + i) % loops]->pieces.work(own);
    }
  }

  uint64_t wait_for_round_after(uint64_t seen, int own) {
    const auto called = [&] { return round_.load() != seen && (own <= wanted_helpers() || stop_.load()); };
    const auto another = [&] { return round_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(another) || !called()) {
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_[size_t(own)].store(true);
      wake_.wait(lock, called);
      asleep_[size_t(own)].store(false);
      lock.unlock();
      leave_core(caller_core_.load());
    }
    return round_.load();
  }

  const int threads_;
  const OpenMp openmp_;
  std::vector<std::unique_ptr<Seat>> seats_;
  std::vector<std::thread> helpers_;
  std::atomic<uint64_t> round_{0};  // loops begun
  std::vector<std::atomic<bool>> asleep_;  // by number of a helper
  std::atomic<int> caller_core_{-1};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace billfish
