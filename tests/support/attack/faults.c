// A library for LD_PRELOAD whose system calls fail, once or for good, when they change something below one folder.
//
//   fault_arm(folder, at, error, kind)   the call number `at` (from 0) fails with `error`. kind: ONCE, FOR_GOOD (and all that follow but
//                                        removals), SHORT (half of a write succeeds, the next one fails for good), KILL (half of a write
//                                        is done and the process is ended by SIGKILL)
//   fault_calls()                        how many such calls there have been since then
//
// A call that fails has changed nothing, except for close, which closes and then fails, as on a network file system.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ONCE, FOR_GOOD, SHORT, KILL };

static char folder[PATH_MAX];
static long calls, at = -1;
static int error_number, kind, halved;

void fault_arm(const char* where, long when, int number, int how) {
  snprintf(folder, sizeof folder, "%s", where);
  calls = 0, at = when, error_number = number, kind = how, halved = 0;
}

long fault_calls(void) { return calls; }

#define REAL(name) ((typeof(&name))real(#name))

static void* real(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (!found) abort();
  return found;
}

static int is_inside(const char* path) {
  char whole[PATH_MAX];
  if (!*folder || !path) return 0;
  if (*path != '/') {
    if (!getcwd(whole, sizeof whole)) return 0;
    const size_t length = strlen(whole);
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    path = whole;
  }
  const size_t length = strlen(folder);
  return !strncmp(path, folder, length) && path[length] == '/';
}

static int is_file_inside(int fd) {
  char link[64], path[PATH_MAX];
  if (!*folder) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_inside(path);
}

// Whether this call is to fail. halves: whether it could be done by half, which the caller then does.
static int fails(int inside, int* half) {
  if (!inside || at < 0) return 0;
  const long number = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
  if (halved || (kind == FOR_GOOD && number > at)) {
    errno = error_number;
    return 1;
  }
  if (number != at) return 0;
  if (kind == SHORT || kind == KILL) {
    if (half) {
      *half = 1, halved = 1;
      return 0;
    }
    if (kind == KILL) kill(getpid(), SIGKILL);
  }
  errno = error_number;
  return 1;
}

static void end_if_killed(int half) {
  if (half && kind == KILL) kill(getpid(), SIGKILL);
}

ssize_t write(int fd, const void* data, size_t size) {
  int half = 0;
  if (fails(is_file_inside(fd), &half)) return -1;
  const ssize_t done = REAL(write)(fd, data, half ? size / 2 : size);
  end_if_killed(half);
  return done;
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  int half = 0;
  if (fails(is_file_inside(fd), &half)) return -1;
  const ssize_t done = REAL(pwrite)(fd, data, half ? size / 2 : size, offset);
  end_if_killed(half);
  return done;
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) { return pwrite(fd, data, size, (off_t)offset); }

ssize_t writev(int fd, const struct iovec* parts, int count) {
  return fails(is_file_inside(fd), NULL) ? -1 : REAL(writev)(fd, parts, count);
}

int fsync(int fd) { return fails(is_file_inside(fd), NULL) ? -1 : REAL(fsync)(fd); }

int fdatasync(int fd) { return fails(is_file_inside(fd), NULL) ? -1 : REAL(fdatasync)(fd); }

int ftruncate(int fd, off_t size) { return fails(is_file_inside(fd), NULL) ? -1 : REAL(ftruncate)(fd, size); }

int ftruncate64(int fd, off64_t size) { return ftruncate(fd, (off_t)size); }

int close(int fd) {
  const int inside = is_file_inside(fd);
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  struct stat about;
  const int file = inside && !stat(link, &about) && S_ISREG(about.st_mode) && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
  const int failed = fails(file, NULL), saved = errno;
  const int done = REAL(close)(fd);
  if (!failed) return done;
  errno = saved;
  return -1;
}

int rename(const char* from, const char* to) { return fails(is_inside(to), NULL) ? -1 : REAL(rename)(from, to); }

int link(const char* from, const char* to) { return fails(is_inside(to), NULL) ? -1 : REAL(link)(from, to); }

int mkdir(const char* path, mode_t mode) { return fails(is_inside(path), NULL) ? -1 : REAL(mkdir)(path, mode); }

// Removals may fail once, but not for good: a full disk does not refuse them.
static int removal_fails(const char* path) { return kind != FOR_GOOD && !halved && fails(is_inside(path), NULL); }

int unlink(const char* path) { return removal_fails(path) ? -1 : REAL(unlink)(path); }

int rmdir(const char* path) { return removal_fails(path) ? -1 : REAL(rmdir)(path); }

#define OPENING(name)                                                               \
  int name(const char* path, int flags, ...) {                                      \
    mode_t mode = 0;                                                                \
    if (flags & (O_CREAT | O_TMPFILE)) {                                            \
      va_list more;                                                                 \
      va_start(more, flags);                                                        \
      mode = va_arg(more, mode_t);                                                  \
      va_end(more);                                                                 \
    }                                                                               \
    if ((flags & O_CREAT) && fails(is_inside(path), NULL)) return -1;               \
    return REAL(name)(path, flags, mode);                                           \
  }
OPENING(open)
OPENING(open64)
