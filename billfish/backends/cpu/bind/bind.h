// What the files that make up the Python module share.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "layout/problem.h"

namespace billfish {

template <class T> using Contiguous = nanobind::ndarray<T, nanobind::c_contig, nanobind::device::cpu>;

// The description of packed weights, as the Python side keeps it.
struct Description {
  int64_t n, k;
  int codes, scales, bias, group;
  float factor;
  std::vector<int> table;

  Weights weights(const Level& level, const uint8_t* stream) const {
    Weights w{stream, n, k, Codes(codes), Scales(scales), bias, group, factor, {}};
    for (size_t i = 0; i < table.size() && i < 16; i++) w.table[i] = uint8_t(table[i] + level.signed_bias);
    return w;
  }
};

// The level of that name; throws if this machine cannot run it.
const Level& find_level(const std::string& name);

// Storage as the Python side describes it, without scales that are decoded already.
Storage storage_of(const uint8_t* bytes, nanobind::dict about);

void bind_decoder(nanobind::module_& module);

}  // namespace billfish
