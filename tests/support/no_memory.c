// A library for LD_PRELOAD: from no_memory(1) on, the system has no memory for a kernel. Kernels ask for aligned memory only.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_int armed, refused_in_helpers;

void no_memory(int yes) { armed = yes; }

int refusals_in_helpers(void) { return refused_in_helpers; }

void *aligned_alloc(size_t alignment, size_t size) {
  static void *(*real)(size_t, size_t);
  if (armed) {
    if (syscall(SYS_gettid) != getpid()) refused_in_helpers++;
    errno = ENOMEM;
    return NULL;
  }
  if (!real) real = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "aligned_alloc");
  return real(alignment, size);
}
