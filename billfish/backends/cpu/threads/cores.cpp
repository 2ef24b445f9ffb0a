#include "threads/cores.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

namespace billfish {
namespace {

constexpr double UNLIMITED = 1e9;  // cores

// "a,b,c" has "b".
bool has(const std::string& list, const std::string& item) { return ("," + list + ",").find("," + item + ",") != std::string::npos; }

// A hierarchy of cgroups: where it is mounted, and which of its groups is there.
struct Mount {
  bool v2;
  std::string group, point;
};

// Those with CPU quotas. A line: "30 23 0:26 /group /point rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct".
std::vector<Mount> mounts(const std::string& root) {
  std::vector<Mount> found;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream place(line.substr(0, dash)), system(line.substr(dash + 3));
    std::string skipped, group, point, type, device, options;
    place >> skipped >> skipped >> skipped >> group >> point;
    system >> type >> device >> options;
    if (type == "cgroup2" || (type == "cgroup" && has(options, "cpu"))) found.push_back({type == "cgroup2", group, point});
  }
  return found;
}

// The group of this process in that version's hierarchy. A line: "4:cpu,cpuacct:/group", or "0::/group" for version 2.
std::string group_of_process(const std::string& root, bool v2) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (v2 ? line.compare(0, 3, "0::") == 0 : has(controllers, "cpu")) return line.substr(second + 1);
  }
  return "/";
}

// "max 100000" is no number, and "-1" no quota.
double quotient(double quota, double period) { return quota > 0 && period > 0 ? quota / period : UNLIMITED; }

double read_number(std::istream& from) {
  double number = 0;
  return from >> number ? number : 0;
}

double quota_in(const std::string& folder, bool v2) {
  std::ifstream first(folder + (v2 ? "/cpu.max" : "/cpu.cfs_quota_us"));
  const double quota = read_number(first);
  if (v2) return quotient(quota, read_number(first));
  std::ifstream second(folder + "/cpu.cfs_period_us");
  return quotient(quota, read_number(second));
}

}  // namespace

int quota_cores(const std::string& root) {
  double least = UNLIMITED;
  for (const Mount& mount : mounts(root)) {
    // In a container the mount is often the container's own group, and a path that does not begin with it leads nowhere here.
    std::string below = group_of_process(root, mount.v2);
    const std::string above = mount.group == "/" ? "" : mount.group;
    below = below.compare(0, above.size() + 1, above + "/") == 0 ? below.substr(above.size()) : "";
    for (;;) {
      least = std::min(least, quota_in(root + mount.point + below, mount.v2));
      const size_t slash = below.rfind('/');
      if (slash == std::string::npos) break;
      below.resize(slash);
    }
  }
  return least < UNLIMITED ? std::max(1, int(std::ceil(std::min(least, 1e6)))) : 0;
}

int available_cores(const std::string& root) {
  int cores = std::max(1, int(std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) cores = std::max(1, CPU_COUNT(&allowed));
#endif
  const int quota = quota_cores(root);
  return quota > 0 ? std::min(cores, quota) : cores;
}

}  // namespace billfish
