// One loop at a time, cut into pieces that threads draw: no result depends on who drew which.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace billfish {

// How long a thread waits for others by spinning before it sleeps.
constexpr auto SPIN = std::chrono::microseconds(300);

inline void pause() {
#if defined(__aarch64__)
  asm volatile("yield");
#elif defined(__x86_64__)
  asm volatile("pause");
#endif
}

// Spins until done(), but not for longer than SPIN. Returns what done() said last.
template <class Done> bool spin_until(Done done) {
  using Clock = std::chrono::steady_clock;
  for (Clock::time_point deadline{};;) {
    for (int i = 0; i < 64; i++) {
      if (done()) return true;
      pause();
    }
    const auto now = Clock::now();  // seldom: it takes as long as drawing a piece
    if (deadline == Clock::time_point{}) deadline = now + SPIN;
    else if (now >= deadline) return false;
  }
}

class Pieces {
 public:
  explicit Pieces(int threads) : queues_(size_t(threads)) {}

  size_t threads() const { return queues_.size(); }

  // body(first, last) for [0, count). `least`: see parallel_for.
  void begin(int64_t count, const std::function<void(int64_t, int64_t)>& body, int64_t least) {
    const int64_t all = int64_t(queues_.size());
    const int64_t pieces = std::min({count, PIECES * all, std::max(all, count / least)});
    count_ = count, pieces_ = pieces;
    body_ = &body;
    done_.store(0, std::memory_order_relaxed);
    for (int64_t i = 0; i < all; i++)
      queues_[size_t(i)].ticket.store(uint64_t(pieces * i / all) << 32 | uint64_t(pieces * (i + 1) / all), std::memory_order_release);
  }

  // By thread `own`, until none is left to draw. Others may still have one in hand. After an exception the other pieces are drawn and left out:
  // nothing may end the loop, and with it `body`, while a thread is in it.
  void work(size_t own) {
    for (size_t i = 0; i < queues_.size(); i++) {
      Queue& queue = queues_[(own + i) % queues_.size()];
      for (;;) {
        const uint64_t ticket = queue.ticket.fetch_add(uint64_t(1) << 32, std::memory_order_acq_rel);
        const int64_t piece = int64_t(ticket >> 32), end = int64_t(ticket & 0xffffffff);
        if (piece >= end) break;
        try {
          if (!failed_.load(std::memory_order_relaxed)) (*body_)(count_ * piece / pieces_, count_ * (piece + 1) / pieces_);
        } catch (...) {
          if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
        finish_one();
      }
    }
  }

  // By the caller of the loop: returns when all are done, or throws what a piece threw first. A thread that has a piece in hand may have lost
  // its core to another process for long, so the caller spins for a moment and then sleeps, which leaves its own core to that thread.
  void wait() {
    const auto all_done = [&] { return done_.load() == pieces_; };
    if (!spin_until(all_done)) {
      std::unique_lock<std::mutex> lock(mutex_);
      awaited_.store(true);  // sequentially consistent with done_: either the last thread sees it, or we see that all are done
      over_.wait(lock, all_done);
      awaited_.store(false);
    }
    if (failed_.exchange(false)) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  // After the last fetch_add the next loop may begin, which changes pieces_.
  void finish_one() {
    const int64_t all = pieces_;
    if (done_.fetch_add(1) + 1 == all && awaited_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      over_.notify_all();
    }
  }

  static constexpr int64_t PIECES = 16;  // for each thread at most: more than one, so that a slow one takes fewer

  // Each thread has a queue of pieces that lie one after the other, and when it is through with it, takes from the others'.
  // A ticket holds the number of the queue's next piece and its end: (next << 32) | end. Whoever draws a valid one knows from
  // it alone that its loop is not over, so that count_, pieces_ and body_ are still that loop's.
  struct alignas(64) Queue {
    std::atomic<uint64_t> ticket{0};
  };

  std::vector<Queue> queues_;
  int64_t count_ = 0, pieces_ = 0;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;        // of whoever has set failed_
  std::atomic<bool> awaited_{false};  // the caller sleeps
  std::mutex mutex_;
  std::condition_variable over_;
  alignas(64) std::atomic<int64_t> done_{0};  // changed by each piece, while the above is read
};

}  // namespace billfish
