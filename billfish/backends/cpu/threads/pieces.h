// One loop, cut into pieces that threads draw: no result depends on who drew which.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

namespace billfish {

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
        done_.fetch_add(1, std::memory_order_acq_rel);
      }
    }
  }

  bool all_done() const { return done_.load(std::memory_order_acquire) == pieces_; }

  // When all are done, by the caller of the loop: throws what a piece threw first.
  void rethrow() {
    if (failed_.exchange(false)) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  static constexpr int64_t PIECES = 16;  // for each thread at most: more than one, so that a slow one takes fewer

  // Each thread has a queue of pieces that lie one after the other, and when it is through with it, takes from the others'.
  // A ticket holds the number of the queue's next piece and its end: (next << 32) | end. Whoever draws a valid one knows from
  // it alone that its loop is not over, so that count_, pieces_ and body_ are still that loop's.
  struct alignas(64) Queue {
    std::atomic<uint64_t> ticket{0};
  };

  std::vector<Queue> queues_;
  std::atomic<int64_t> done_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // of whoever has set failed_
  int64_t count_ = 0, pieces_ = 0;
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
};

}  // namespace billfish
