// The library of NVIDIA's driver, opened by name. It stays open until the process ends.
#pragma once
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace billfish::cuda {

class Library {
 public:
#if defined(_WIN32)
  static constexpr const char* NAME = "nvcuda.dll";
  // Only from System32, where the driver is installed: not a file of that name in the current folder.
  Library() : handle_(LoadLibraryExA(NAME, nullptr, LOAD_LIBRARY_SEARCH_SYSTEM32)) {}
  void* find(const char* function) const { return reinterpret_cast<void*>(GetProcAddress(handle_, function)); }
#else
  static constexpr const char* NAME = "libcuda.so.1";
  Library() : handle_(dlopen(NAME, RTLD_NOW)) {}
  void* find(const char* function) const { return dlsym(handle_, function); }
#endif
  explicit operator bool() const { return handle_ != nullptr; }

 private:
#if defined(_WIN32)
  HMODULE handle_;
#else
  void* handle_;
#endif
};

}  // namespace billfish::cuda
