// How many cores this process may use.
#pragma once
#include <string>
#include <vector>

namespace billfish {

// What the CPU quotas of this process's cgroup and of all above it leave, rounded up, at least 1; 0 where there is none. Both versions of
// cgroups count. `root` stands before /proc and before every mount point: empty, but for tests.
int quota_cores(const std::string& root = "");

// How many cores these logical processors are. Two hyperthreads share the units of one core, which a kernel fills alone. Where Linux does not
// say who shares, each is a core.
int physical_cores(const std::vector<int>& processors, const std::string& root = "");

// The cores that the scheduler may give to this thread, but no more than the quota. On Linux hyperthreads count once.
int available_cores(const std::string& root = "");

}  // namespace billfish
