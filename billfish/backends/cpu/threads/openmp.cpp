#include "threads/openmp.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include "threads/float_mode.h"

namespace billfish {

#if defined(_WIN32)
// torch's OpenMP there is Microsoft's, whose entry points are others.
OpenMp OpenMp::of(const std::string&) { return {}; }
#else
OpenMp OpenMp::of(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return {};
  // Looked for in the library and in what it is linked with. Others in the process may have brought an OpenMP of their own.
  OpenMp found;
  found.parallel = reinterpret_cast<decltype(found.parallel)>(dlsym(handle, "GOMP_parallel"));
  found.thread_number = reinterpret_cast<decltype(found.thread_number)>(dlsym(handle, "omp_get_thread_num"));
  found.usual_threads = reinterpret_cast<decltype(found.usual_threads)>(dlsym(handle, "omp_get_max_threads"));
  return found ? found : OpenMp{};  // the handle stays open, so that the library does
}
#endif

void OpenMp::run(Pieces& pieces) const {
  struct Argument {
    const OpenMp& library;
    Pieces& pieces;
  } argument{*this, pieces};
  const auto body = [](void* given) {
    const auto& [library, own] = *static_cast<Argument*>(given);
    const KnownFloats known;
    const size_t number = size_t(library.thread_number());
    if (number < own.threads()) own.work(number);
  };
  // As many threads as torch's own loops have, since another number would end and start threads in each call. Where they have one, torch
  // starts none, and we may.
  const int usual = usual_threads();
  parallel(body, &argument, usual > 1 ? unsigned(usual) : unsigned(pieces.threads()), 0);
}

}  // namespace billfish
