#include "threads/cores.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>
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

// The lines of a file; none if it cannot be read. C's own streams: those of C++ are shared by all modules of a process, and other
// modules bring other versions of them.
std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    char part[256];
    for (bool fresh = true; std::fgets(part, sizeof part, file);) {
      if (fresh) lines.emplace_back();
      lines.back() += part;
      fresh = lines.back().back() == '\n';
      if (fresh) lines.back().pop_back();
    }
    std::fclose(file);
  }
  return lines;
}

// The words of a line, which single spaces keep apart.
std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words(1);
  for (const char c : line)
    if (c == ' ') words.emplace_back();
    else words.back() += c;
  return words;
}

// Those with CPU quotas. A line: "30 23 0:26 /group /point rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct".
std::vector<Mount> mounts(const std::string& root) {
  std::vector<Mount> found;
  for (const std::string& line : lines_of(root + "/proc/self/mountinfo")) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto place = words_of(line.substr(0, dash)), system = words_of(line.substr(dash + 3));
    if (place.size() < 5 || system.size() < 3) continue;
    const std::string &type = system[0], &options = system[2];
    if (type == "cgroup2" || (type == "cgroup" && has(options, "cpu"))) found.push_back({type == "cgroup2", place[3], place[4]});
  }
  return found;
}

// The group of this process in that version's hierarchy. A line: "4:cpu,cpuacct:/group", or "0::/group" for version 2.
std::string group_of_process(const std::string& root, bool v2) {
  for (const std::string& line : lines_of(root + "/proc/self/cgroup")) {
    const size_t first = line.find(':'), second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (v2 ? line.compare(0, 3, "0::") == 0 : has(controllers, "cpu")) return line.substr(second + 1);
  }
  return "/";
}

// "max 100000" is no number, and "-1" no quota.
double quotient(double quota, double period) { return quota > 0 && period > 0 ? quota / period : UNLIMITED; }

// The numbers in the first line of a file, as many as there are, up to two.
std::array<double, 2> numbers_in(const std::string& path) {
  std::array<double, 2> numbers{0, 0};
  const std::vector<std::string> lines = lines_of(path);
  const char* at = lines.empty() ? "" : lines[0].c_str();
  for (double& number : numbers) {
    char* end;
    number = std::strtod(at, &end);
    if (end == at || !std::isfinite(number)) {
      number = 0;
      break;
    }
    at = end;
  }
  return numbers;
}

double quota_in(const std::string& folder, bool v2) {
  if (v2) {
    const auto [quota, period] = numbers_in(folder + "/cpu.max");
    return quotient(quota, period);
  }
  return quotient(numbers_in(folder + "/cpu.cfs_quota_us")[0], numbers_in(folder + "/cpu.cfs_period_us")[0]);
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

int physical_cores(const std::vector<int>& processors, const std::string& root) {
  std::set<int> first_threads;
  for (const int processor : processors) {
    const auto list = lines_of(root + "/sys/devices/system/cpu/cpu" + std::to_string(processor) + "/topology/thread_siblings_list");  // "0,64" or "0-1"
    char* end = nullptr;
    const long first = list.empty() ? 0 : std::strtol(list[0].c_str(), &end, 10);
    first_threads.insert(end && end != list[0].c_str() ? int(first) : processor);
  }
  return int(first_threads.size());
}

int available_cores(const std::string& root) {
  int cores = std::max(1, int(std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    std::vector<int> processors;
    for (int i = 0; i < CPU_SETSIZE; i++)
      if (CPU_ISSET(i, &allowed)) processors.push_back(i);
    cores = std::max(1, physical_cores(processors, root));
  }
#endif
  const int quota = quota_cores(root);
  return quota > 0 ? std::min(cores, quota) : cores;
}

}  // namespace billfish
