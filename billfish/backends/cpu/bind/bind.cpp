// The Python module: levels of this machine, packing, products. Arguments have been checked by the Python side.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "activations/rows.h"
#include "bind/arguments.h"
#include "layout/prepack.h"
#include "layout/problem.h"
#include "layout/unpack.h"
#include "threads/cores.h"
#include "threads/threads.h"

namespace nb = nanobind;
using namespace billfish;

namespace billfish {
void bind_decoder(nb::module_& module);
void bind_experts(nb::module_& module);
void bind_rates(nb::module_& module);
void bind_search(nb::module_& module);
void bind_text(nb::module_& module);
}  // namespace billfish

namespace {

size_t packed_bytes(const std::string& level, const Description& d) {
  const Level& chosen = find_level(level);
  return expert_bytes(chosen, d.weights(chosen, nullptr));
}

// Codes as storage has them, and fields of scales: [N, count, size] for chunks and for groups.
void prepack(const std::string& name, const Description& d, Contiguous<const uint8_t> bytes, bool words, nb::dict about,
             const std::vector<Contiguous<const uint8_t>>& chunk_fields, const std::vector<Contiguous<const uint8_t>>& group_fields,
             Contiguous<uint8_t> out) {
  const Level& level = find_level(name);
  const Weights w = d.weights(level, nullptr);
  const TileShape shape(w, level.tile_rows);
  auto fields = [](const std::vector<Contiguous<const uint8_t>>& arrays) {
    std::vector<Field> out;
    for (const auto& a : arrays) {
      const int64_t count = int64_t(a.shape(1)), size = int64_t(a.shape(2));
      out.push_back({a.data(), count * size, size, count, int(size)});
    }
    return out;
  };
  const std::vector<Field> per_chunk = fields(chunk_fields), per_group = fields(group_fields);
  const Storage s = storage_of(bytes.data(), about);
  const CodeReader codes(level, s, words, w);
  const Computing computing;
  parallel_for((d.n + shape.rows - 1) / shape.rows, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile++) pack_tile(w, codes, per_chunk, per_group, tile, out.data() + tile * shape.tile_bytes);
  });
}

// One matrix to pack from blocks as a file holds them, with float16 scales inside: description, blocks, what the Python side says about
// them, and where the stream goes.
using BlockMatrix = std::tuple<Description, Contiguous<const uint8_t>, nb::dict, Contiguous<uint8_t>>;

// As prepack(), with scales from the blocks too, and for many matrices at once: their tiles are shared out together. Returns for each
// whether its scales are finite; where they are not, they need float32, and what was packed is of no use.
std::vector<bool> prepack_blocks(const std::string& name, const std::vector<BlockMatrix>& matrices) {
  const Level& level = find_level(name);
  struct Job {
    Weights weights;
    Storage storage;
    std::vector<Field> halves;
    uint8_t* out;
    size_t tile_bytes;
    int64_t first_tile;
  };
  std::vector<Job> jobs;
  int64_t tiles = 0;
  for (const auto& [description, bytes, about, out] : matrices) {
    const Weights w = description.weights(level, nullptr);
    const TileShape shape(w, level.tile_rows);
    const Storage s = storage_of(bytes.data(), about);
    Job job{w, s, {}, out.data(), shape.tile_bytes, tiles};
    for (const int offset : {s.scale_offset, s.minimum_offset})
      if (offset >= 0) job.halves.push_back({s.bytes + offset, s.row_bytes, s.block_bytes, s.k / s.block, 2});
    jobs.push_back(job);
    tiles += (w.n + shape.rows - 1) / shape.rows;
  }
  std::vector<std::atomic<bool>> odd(jobs.size());
  const Computing computing;
  parallel_for(tiles, [&](int64_t first, int64_t last) {
    size_t at = 0;
    std::vector<uint8_t> integers;
    for (int64_t tile = first; tile < last; tile++) {
      while (at + 1 < jobs.size() && jobs[at + 1].first_tile <= tile) at++;
      const Job& job = jobs[at];
      const Storage& s = job.storage;
      const int64_t own = tile - job.first_tile, begin = own * level.tile_rows, end = std::min(s.n, begin + level.tile_rows);
      const CodeReader codes(level, s, false, job.weights);
      uint8_t* out = job.out + own * job.tile_bytes;
      if (has_two_levels(s)) pack_tile(job.weights, codes, job.halves, small_integers(s, begin, end, integers), own, out);
      else pack_tile(job.weights, codes, {}, job.halves, own, out);
      const Field& scales = job.halves[0];
      for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < scales.count; i++) {
          const uint8_t high = scales.data[row * scales.row_stride + i * scales.item_stride + 1];
          if ((high & 0x7c) == 0x7c) odd[at] = true;  // its exponent is all ones
        }
    }
  });
  std::vector<bool> finite;
  for (const auto& some : odd) finite.push_back(!some);
  return finite;
}

// Unquantized weights [n, k], as bytes.
void prepack_plain(const std::string& name, const Description& d, Contiguous<const uint8_t> numbers, Contiguous<uint8_t> out) {
  const Level& level = find_level(name);
  const Weights w = d.weights(level, nullptr);
  const TileShape shape(w, level.tile_rows);
  const auto pack = w.codes == Codes::f32 ? pack_plain_tile<uint32_t> : pack_plain_tile<uint16_t>;
  const Computing computing;
  parallel_for((d.n + shape.rows - 1) / shape.rows, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile++) pack(w, numbers.data(), shape.rows, tile, out.data() + tile * shape.tile_bytes);
  });
}

// The inverse of prepack: codes [N, K] with `flip` inverted bits, and fields [N, count, size] for chunks and for groups.
void unpack(const std::string& name, const Description& d, Contiguous<const uint8_t> stream, int flip, Contiguous<uint8_t> codes,
            const std::vector<Contiguous<uint8_t>>& chunk_fields, const std::vector<Contiguous<uint8_t>>& group_fields) {
  const Level& level = find_level(name);
  const Weights w = d.weights(level, nullptr);
  const TileShape shape(w, level.tile_rows);
  auto fields = [](const std::vector<Contiguous<uint8_t>>& arrays) {
    std::vector<OutField> out;
    for (const auto& a : arrays) out.push_back({a.data(), int64_t(a.shape(1)), int(a.shape(2))});
    return out;
  };
  const std::vector<OutField> per_chunk = fields(chunk_fields), per_group = fields(group_fields);
  const Computing computing;
  parallel_for((d.n + shape.rows - 1) / shape.rows, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile++)
      unpack_tile(w, level, stream.data() + tile * shape.tile_bytes, uint8_t(flip), per_chunk, per_group, tile, codes.data());
  });
}

// x quantized already: codes [m, k], k a multiple of 32, with a scale for each 32.
void multiply_codes(const std::string& name, const Description& d, Contiguous<const uint8_t> stream, Contiguous<const int8_t> codes,
                    Contiguous<const float> scale, Contiguous<float> y) {
  const Level& level = find_level(name);
  const Weights w = d.weights(level, stream.data());
  const int64_t m = int64_t(codes.shape(0)), blocks = d.k / 32;
  const Computing computing;
  Prepared x;
  x.begin(level, w, m, 1, 1);
  for_each_part(m, x.bundle(), blocks, true, [&](const Prepared::Part& part) {
    for (int64_t row = part.first_row; row < part.first_row + part.rows; row++) {
      const RowOfX out(x.integers, row);
      if (part.first_block == 0) out.set_power(1);
      for (int64_t b = part.first_block; b < part.last_block; b++) {
        const int8_t* from = codes.data() + row * d.k + b * 32;
        std::copy_n(from, 32, out.codes(b, 0));
        const int32_t halves[1][2] = {{std::accumulate(from, from + 16, 0), std::accumulate(from + 16, from + 32, 0)}};
        out.finish(b, scale.data()[row * blocks + b], halves, 1);
      }
    }
    x.finish(part);
  });
  parallel_for((w.n + level.tile_rows - 1) / level.tile_rows, [&](int64_t first, int64_t last) { x.multiply(w, nullptr, y.data(), first, last); });
}

// A product: level, weights and their stream, x [m, k], digits (0 for exact, 1 for q8, 2 for q16), bias [n] and y [m, n].
using Bias = std::optional<Contiguous<const float>>;
using ProductArrays = std::tuple<std::string, const Description*, Contiguous<const uint8_t>, Contiguous<const float>, int, Bias, Contiguous<float>>;

// The buffer for x that this thread keeps between calls.
Rows& kept_rows() {
  static thread_local Rows rows;
  return rows;
}

// Frees the buffer at the end of the call if it is too large to keep.
struct LentRows {
  Rows& rows = kept_rows();
  ~LentRows() {
    if (rows.bytes() > KEPT_BYTES) rows = Rows();
  }
};

bool all_finite(const float* values, int64_t count) {
  uint32_t lanes[8] = {};  // a sign where an exponent is all ones
  auto look = [](float value, uint32_t& lane) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    lane |= (bits & 0x7fffffff) + 0x00800000;
  };
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int lane = 0; lane < 8; lane++) look(values[i + lane], lanes[lane]);
  for (; i < count; i++) look(values[i], lanes[0]);
  return !(std::accumulate(lanes, lanes + 8, 0u, std::bit_or<uint32_t>()) >> 31);
}

// Sums of large terms overflow on the way to a finite y. Where y is not finite and its row of x is, the row is multiplied again with
// 2^-64 of x: what that loses is far below the rounding of terms of 2^128. Each row alone, so that its bits are the same in any batch.
void mend_overflow(const Level& level, const LinearInto& product, const float* x, int64_t m, int digits) {
  constexpr float DOWN = 0x1p-64f;
  constexpr double UP = 0x1p64;
  const int64_t n = product.weights.n, k = product.weights.k;
  if (all_finite(product.y, m * n)) return;
  std::vector<float> row(static_cast<size_t>(k)), again(static_cast<size_t>(n));
  for (int64_t i = 0; i < m; i++) {
    float* y = product.y + i * n;
    const float* from = x + i * k;
    if (all_finite(y, n) || !all_finite(from, k)) continue;
    std::transform(from, from + k, row.begin(), [](float value) { return value * DOWN; });
    Rows rows;
    rows.begin(level, 1, k, digits);
    rows.take({&product.weights}, row.data());
    rows.multiply({{product.weights, nullptr, again.data()}});
    for (int64_t j = 0; j < n; j++)
      if (!std::isfinite(y[j])) y[j] = float(double(again[size_t(j)]) * UP + (product.bias ? double(product.bias[j]) : 0.0));
  }
}

// Those that begin a list and have one x, made together; how many these are.
size_t multiply_one_x(const ProductArrays* all, size_t count) {
  const LentRows lent;
  Rows& rows = lent.rows;
  const auto& [name, description, stream, x, digits, bias, y] = all[0];
  const Level& level = find_level(name);
  std::vector<Weights> weights;
  std::vector<const Weights*> kinds;
  std::vector<LinearInto> products;
  weights.reserve(count);
  for (size_t i = 0; i < count; i++) {
    const auto& [other_name, d, bytes, other, other_digits, added, out] = all[i];
    if (other.data() != x.data() || other.shape(0) != x.shape(0) || other.shape(1) != x.shape(1) || other_digits != digits || other_name != name) break;
    kinds.push_back(&weights.emplace_back(d->weights(level, bytes.data())));
    products.push_back({weights.back(), added ? added->data() : nullptr, out.data()});
  }
  const int64_t m = int64_t(x.shape(0)), k = int64_t(x.shape(1));
  const float* source = x.data();
  std::vector<float> copy;  // where y takes the place of x
  for (const LinearInto& product : products)
    if (copy.empty() && product.y < x.data() + m * k && x.data() < product.y + m * product.weights.n) {
      copy.assign(x.data(), x.data() + m * k);
      source = copy.data();
    }
  rows.begin(level, m, k, digits);
  rows.take(kinds, source);
  rows.multiply(products);
  for (const LinearInto& product : products) mend_overflow(level, product, source, m, digits);
  return products.size();
}

void multiply(const std::string& name, const Description& d, Contiguous<const uint8_t> stream, Contiguous<const float> x, int digits, Bias bias,
              Contiguous<float> y) {
  const ProductArrays product{name, &d, std::move(stream), std::move(x), digits, std::move(bias), std::move(y)};
  const Computing computing;
  multiply_one_x(&product, 1);
}

// One after the other without Python in between, but those that have one x together.
void multiply_all(const std::vector<ProductArrays>& all) {
  const Computing computing;
  for (size_t first = 0; first < all.size();) first += multiply_one_x(all.data() + first, all.size() - first);
}

// A GroupField: its bytes, kind and strides.
using FieldArray = std::tuple<Contiguous<const uint8_t>, int, int64_t, int64_t>;

// Fields are there where scales are not inside the blocks, and byte_values where they are bytes.
void dequantize(const std::string& name, Contiguous<const uint8_t> bytes, bool words, nb::dict about, std::optional<FieldArray> scale,
                std::optional<FieldArray> minimum, std::optional<FieldArray> zero, std::optional<Contiguous<const float>> byte_values,
                std::optional<Contiguous<const uint8_t>> scaled_tables, std::optional<Contiguous<const float>> numbers, nb::ndarray<nb::c_contig, nb::device::cpu> out, int type) {
  const Level& level = find_level(name);
  Storage s = storage_of(bytes.data(), about);
  auto field = [](const std::optional<FieldArray>& given) {
    if (!given) return GroupField{};
    const auto& [data, kind, row_stride, stride] = *given;
    return GroupField{GroupField::Kind(kind), data.data(), row_stride, stride};
  };
  s.scale = field(scale), s.minimum = field(minimum), s.zero = field(zero);
  s.byte_values = byte_values ? byte_values->data() : nullptr;
  s.scaled_tables = scaled_tables ? scaled_tables->data() : nullptr;
  s.numbers = numbers ? numbers->data() : nullptr, s.per_byte = numbers ? int32_t(numbers->shape(1)) : 0;
  void* target = out.data();
  const Computing computing;
  parallel_for(s.n, [&](int64_t first, int64_t last) {
    (words ? level.dequantize_words : level.dequantize_rows)(s, target, type, first, last);
  });
}

// Strings in a file lie one after the other, each behind its length, 8 bytes. `ends` gets where each ends, from the first's beginning. How many there
// are before one is longer than what is left of the bytes: the file is not believed.
int64_t string_ends(Contiguous<const uint8_t> bytes, Contiguous<uint64_t> ends) {
  const uint64_t size = bytes.size();
  uint64_t at = 0, length;
  for (int64_t i = 0; i < int64_t(ends.size()); i++) {
    if (size - at < sizeof length) return i;
    std::memcpy(&length, bytes.data() + at, sizeof length);
    at += sizeof length;
    if (length > size - at) return i;
    ends.data()[i] = at += length;
  }
  return int64_t(ends.size());
}

// These strings, for which Python would take a slice and a call each. Bytes that are no UTF-8 become U+FFFD.
nb::list strings(Contiguous<const uint8_t> bytes, Contiguous<const uint64_t> ends) {
  nb::list all = nb::steal<nb::list>(PyList_New(Py_ssize_t(ends.size())));
  if (!all.is_valid()) nb::raise_python_error();
  uint64_t start = 0;
  for (size_t i = 0; i < ends.size(); i++) {
    const uint64_t from = start + sizeof(uint64_t), end = ends.data()[i];
    if (from > end || end > bytes.size()) throw std::invalid_argument("ends of other strings");
    PyObject* string = PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(bytes.data() + from), Py_ssize_t(end - from), "replace");
    if (!string) nb::raise_python_error();
    PyList_SetItem(all.ptr(), Py_ssize_t(i), string);  // takes it over
    start = end;
  }
  return all;
}

// For tests of the threads: body(first, last) of Python's, which has Python when it is called.
void call_in_parallel(int64_t count, const nb::callable& body, int64_t least) {
  const Computing computing;
  parallel_for(count, [&](int64_t first, int64_t last) {
    const nb::gil_scoped_acquire python;
    body(first, last);
  }, std::max<int64_t>(least, 1));
}

// Arithmetic of NumPy, too, is to be known.
struct PythonFloats {
  std::optional<KnownFloats> known;
};

}  // namespace

NB_MODULE(_cpu, module) {
  nb::set_leak_warnings(false);  // at the end of the process, daemon threads still have their arguments
  nb::class_<PythonFloats>(module, "KnownFloats", "A context in which this thread's floating-point mode is the known one.")
      .def(nb::init<>())
      .def("__enter__", [](PythonFloats& self) { self.known.emplace(); })
      .def("__exit__", [](PythonFloats& self, nb::args) { self.known.reset(); });
  nb::class_<Description>(module, "Description")
      .def("__init__", [](Description* self, int64_t n, int64_t k, int codes, int scales, int bias, int group, double factor, std::vector<uint8_t> table) {
        const KnownFloats known;  // the factor may be subnormal as a float
        const volatile double exact = factor;  // read, and so rounded, when the mode is set
        new (self) Description{n, k, codes, scales, bias, group, float(exact), std::move(table)};
      });
  module.def("levels", &levels_here, "The ISA levels that this machine can run, best first.");
  module.def("packed_bytes", &packed_bytes);
  module.def("prepack", &prepack);
  module.def("prepack_blocks", &prepack_blocks);
  module.def("prepack_plain", &prepack_plain);
  module.def("unpack", &unpack);
  module.def("multiply", &multiply, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
  module.def("multiply_all", &multiply_all);
  module.def("multiply_codes", &multiply_codes);
  module.def("kept_bytes", [] { return kept_rows().bytes() + kept_by_experts(); }, "What this thread keeps of the room for x that calls took.");
  module.def("dequantize", &dequantize, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg());
  module.def("string_ends", &string_ends, nb::arg().noconvert(), nb::arg().noconvert(), "Where the strings of a list end, and how many are whole.");
  module.def("strings", &strings, nb::arg().noconvert(), nb::arg().noconvert(), "The strings of a list, given where they end.");
  module.def("quota_cores", &quota_cores, "The cores that CPU quotas of cgroups leave, 0 without; `root` stands before /proc and /sys.");
  module.def("physical_cores", &physical_cores, "How many cores these logical processors are; `root` as above.");
  module.def("available_cores", &available_cores, "Those of the affinity, and not more than the quota; `root` as above.");
  module.def("default_threads", &default_threads, "OMP_NUM_THREADS, or the cores that this process may use.");
  module.def("threads", &threads);
  module.def("set_threads", &set_threads);
  module.def("parallel_for", &call_in_parallel, nb::arg(), nb::arg(), nb::arg("least") = 1, "body(first, last) for [0, count), as kernels share loops.");
  module.def("share_threads_of", &share_threads_of, "Whether loops run on the OpenMP threads of this loaded library from now on.");
  bind_decoder(module);
  bind_experts(module);
  bind_rates(module);
  bind_search(module);
  bind_text(module);
  default_threads();  // looked at now, and then seldom: see threads.h
}
