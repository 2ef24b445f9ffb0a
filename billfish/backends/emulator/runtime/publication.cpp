#include "publication.h"

#include "system.h"

namespace emulator {

namespace {

// Writes of a threadgroup that are known: those of `thread` before `own`, those of all its threads before `all`.
struct Known {
  unsigned threadgroup, thread, all, own;
};

struct Knowledge {
  Known* items;  // sorted by threadgroup and thread
  unsigned count, capacity;

  static bool less(const Known& a, const Known& b) {
    return a.threadgroup != b.threadgroup ? a.threadgroup < b.threadgroup : a.thread < b.thread;
  }

  unsigned find(const Known& wanted) const {  // the first that is not less
    unsigned low = 0, high = count;
    while (low < high) {
      unsigned middle = (low + high) / 2;
      if (less(items[middle], wanted)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  void learn(const Known& news) {
    unsigned at = find(news);
    if (at < count && !less(news, items[at])) {
      if (items[at].all < news.all) items[at].all = news.all;
      if (items[at].own < news.own) items[at].own = news.own;
      return;
    }
    if (count == capacity) {
      capacity = capacity ? 2 * capacity : 8;
      items = (Known*)realloc(items, capacity * sizeof(Known));
    }
    __builtin_memmove(items + at + 1, items + at, (count - at) * sizeof(Known));
    items[at] = news;
    count++;
  }

  void learn(const Knowledge& other) {
    for (unsigned i = 0; i < other.count; i++) learn(other.items[i]);
  }

  bool covers(const Access& access) const {
    Known wanted{access.threadgroup, 0, 0, 0};
    for (unsigned i = find(wanted); i < count && items[i].threadgroup == access.threadgroup; i++) {
      if (access.clock < items[i].all) return true;
      if (items[i].thread == access.thread && access.clock < items[i].own) return true;
    }
    return false;
  }
};

struct Location {  // of an atomic
  unsigned long address;
  Knowledge published;
};

Location* locations;
unsigned location_count, location_capacity;

Knowledge shared;                 // by the whole threadgroup
Knowledge shared_release;         // what its threads had released before their last barrier
Knowledge shared_pending;         // what they had read from atomics by then
Knowledge acquired[max_threads];  // by one thread
Knowledge pending[max_threads];   // read from atomics, not yet acquired
Known released[max_threads];      // by its last fence; own == 0: none
bool used;                        // by this threadgroup

Location& location(unsigned long address) {
  for (unsigned i = 0; i < location_count; i++)
    if (locations[i].address == address) return locations[i];
  if (location_count == location_capacity) {
    location_capacity = location_capacity ? 2 * location_capacity : 64;
    locations = (Location*)realloc(locations, location_capacity * sizeof(Location));
  }
  locations[location_count] = Location{address, {}};
  return locations[location_count++];
}

}  // namespace

void begin_publication() {
  for (unsigned i = 0; i < location_count; i++) free(locations[i].published.items);
  location_count = 0;
  begin_knowledge();
}

void begin_knowledge() {
  shared.count = shared_release.count = shared_pending.count = 0;
  if (!used) return;
  used = false;
  for (unsigned i = 0; i < max_threads; i++) acquired[i].count = pending[i].count = released[i].own = 0;
}

void fence(bool acquire, bool release, unsigned clock, unsigned last_barrier) {
  unsigned me = self->position.index;
  used = true;
  if (acquire) {
    acquired[me].learn(pending[me]);
    acquired[me].learn(shared_pending);
  }
  if (release) released[me] = Known{linear_threadgroup() + 1, me, last_barrier, clock};
}

void publish_atomic(unsigned long address, bool reads, bool writes) {
  // Knowledge only spreads from fences: while nobody has run one there is nothing to keep.
  unsigned me = self->position.index;
  bool releases = writes && (released[me].own || shared_release.count);
  if (!releases && location_count == 0) return;
  Location& place = location(address);
  if (reads) {
    used = true;
    pending[me].learn(place.published);
  } else {
    place.published.count = 0;  // a plain store ends what was released here before
  }
  if (!releases) return;
  if (released[me].own) place.published.learn(released[me]);
  place.published.learn(shared_release);
  place.published.learn(shared);
  place.published.learn(acquired[me]);
}

void share_knowledge(bool device_memory) {
  if (!used) return;
  for (unsigned i = 0; i < dispatch.threads; i++) {
    if (device_memory) shared.learn(acquired[i]);
    if (released[i].own) shared_release.learn(released[i]);
    shared_pending.learn(pending[i]);
  }
}

bool known(const Access& access) { return shared.covers(access) || acquired[self->position.index].covers(access); }

}  // namespace emulator
