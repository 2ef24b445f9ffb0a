#include "threads/threads.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>

#include "threads/cores.h"
#include "threads/openmp.h"
#include "threads/team.h"

namespace billfish {
namespace {

constexpr int MOST_THREADS = 1024;

struct State {
  std::atomic<int> wanted{0};  // by set_threads; 0 for the usual number
  std::atomic<int> usual{0};   // 0 where it is to be found out
  std::mutex mutex;
  // With the mutex locked. A team of another size lives on until the last loop on it has ended.
  OpenMp openmp;
  std::shared_ptr<Team> team;
};

State* kept_state = nullptr;

// A child has none of its parent's threads: it forgets the team (without joining what is not there) and makes its own, as OpenMP
// would wait for them. It may also have fewer cores.
[[maybe_unused]] void forget_in_child() {
  auto* fresh = new State;
  fresh->wanted = kept_state->wanted.load();
  kept_state = fresh;
}

// Never destroyed: at the end of the process, daemon threads of Python may still be in a loop, and helpers always wait for one.
State& state() {
  static const bool made = [] {
    kept_state = new State;
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, forget_in_child);
#endif
    return true;
  }();
  (void)made;
  return *kept_state;
}

std::shared_ptr<Team> team_of(int threads) {
  State& s = state();
  std::shared_ptr<Team> former;  // ends after the lock
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.team || s.team->threads() != threads) {
    former = std::exchange(s.team, nullptr);  // where the next line throws
    s.team = std::make_shared<Team>(threads, s.openmp);
  }
  return s.team;
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
  const int size = threads();
  if (size > 1 && count > 1 && team_of(size)->run(count, body, least)) return;
  if (count > 0) body(0, count);
}

bool share_threads_of(const std::string& library) {
  const OpenMp found = OpenMp::of(library);
  if (!found) return false;
  State& s = state();
  std::shared_ptr<Team> former;  // ends after the lock
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.openmp = found;
  former = std::exchange(s.team, nullptr);
  return true;
}

}  // namespace billfish
