// The few functions of the C library that the runtime calls. Declared here, so that no system header need be installed.
#pragma once

extern "C" {
void* malloc(unsigned long size);
void* calloc(unsigned long count, unsigned long size);
void* realloc(void* pointer, unsigned long size);
void free(void* pointer);

struct Dl_info {
  const char* dli_fname;
  void* dli_fbase;
  const char* dli_sname;
  void* dli_saddr;
};
int dladdr(const void* address, Dl_info* info);
}
