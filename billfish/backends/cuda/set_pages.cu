// Entries of the tables of pages that are new: tables[place] = page. A thread has an entry. step_memory.py has the same structure.
#include "device.cuh"

struct NewPage {
  u64 place, page;
};

extern "C" __global__ void __launch_bounds__(256) marlin_set_pages(const NewPage* __restrict__ new_pages, u64* __restrict__ tables, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  wait_for_previous();
  if (i < count) tables[new_pages[i].place] = new_pages[i].page;
}
