// `_cuda`: from Python to a launch without building objects. A NativeLaunch has all but stream and arguments, a NativeProduct all but
// stream, x, bias and y. A Program is a list of launches with their arguments, which are made together without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "launch/driver.h"
#include "launch/library.h"

namespace nb = nanobind;

namespace billfish::cuda {

const Driver& driver() {
  static const Driver found = [] {
    const Library library;
    if (!library) throw std::runtime_error(std::string("no NVIDIA driver: ") + Library::NAME);
    Driver d;
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(library.find(name));
      if (!function) throw std::runtime_error(std::string("an NVIDIA driver without ") + name);
    };
    find(d.launch, "cuLaunchKernelEx");
    find(d.encode_tiled, "cuTensorMapEncodeTiled");
    find(d.get_current, "cuCtxGetCurrent");
    find(d.set_current, "cuCtxSetCurrent");
    find(d.error_name, "cuGetErrorName");
    return d;
  }();
  return found;
}

namespace {

// In Python, a BillfishError.
struct DriverError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(int error, const char* what) {
  if (!error) return;
  const char* name = "an unknown error";
  driver().error_name(error, &name);
  throw DriverError(std::string("[cuda] ") + what + ": " + name);
}

// The arguments of a launch, one after the other, each at a multiple of its size.
class Arguments {
 public:
  // layout: a letter for each: p pointer, i int, f float, m a tensor map, by value.
  explicit Arguments(const std::string& layout) {
    size_t size = 0;
    for (char kind : layout) {
      const size_t bytes = kind == 'm' ? sizeof(TensorMap) : kind == 'p' ? 8 : 4, align = kind == 'm' ? 64 : bytes;
      size = (size + align - 1) / align * align;
      offsets_.push_back(size);
      size += bytes;
    }
    layout_ = layout;
    bytes_.resize(size / sizeof(TensorMap) + 1);
    for (size_t offset : offsets_) pointers_.push_back(at(offset));
  }
  Arguments(const Arguments& other) : layout_(other.layout_), offsets_(other.offsets_), bytes_(other.bytes_) {
    for (size_t offset : offsets_) pointers_.push_back(at(offset));
  }
  Arguments& operator=(const Arguments&) = delete;

  void set(size_t i, nb::handle value) {
    switch (layout_.at(i)) {
      case 'p': put(i, nb::cast<uint64_t>(value)); break;
      case 'i': put(i, nb::cast<int>(value)); break;
      case 'f': put(i, nb::cast<float>(value)); break;
      default: put(i, *nb::cast<const TensorMap*>(value));
    }
  }
  void set(const nb::args& values) {
    if (values.size() != layout_.size()) throw std::invalid_argument("a launch of " + std::to_string(layout_.size()) + " arguments");
    for (size_t i = 0; i < values.size(); i++) set(i, values[i]);
  }
  template <class T> void put(size_t i, const T& value) { std::memcpy(at(offsets_[i]), &value, sizeof(T)); }
  void** pointers() { return pointers_.data(); }

 private:
  char* at(size_t offset) { return reinterpret_cast<char*>(bytes_.data()) + offset; }
  std::string layout_;
  std::vector<size_t> offsets_;
  std::vector<TensorMap> bytes_;
  std::vector<void*> pointers_;
};

class Program;
thread_local Program* recording = nullptr;  // what this thread's launches become part of, instead of being made

// A kernel on its grid.
class NativeLaunch {
 public:
  NativeLaunch(uint64_t function, uint64_t context, std::tuple<unsigned, unsigned, unsigned> grid, unsigned threads, unsigned shared_bytes, unsigned cluster, bool overlap,
         const std::string& layout)
      : layout(layout), function_(reinterpret_cast<void*>(function)), context_(reinterpret_cast<void*>(context)) {
    config_ = {{std::get<0>(grid), std::get<1>(grid), std::get<2>(grid)}, {threads, 1, 1}, shared_bytes, nullptr, nullptr, 0};
    if (overlap) attributes_[config_.attribute_count++] = {PROGRAMMATIC_STREAM_SERIALIZATION, {}, {}}, attributes_[0].value.serialization = 1;
    if (cluster > 1) {
      LaunchAttribute& a = attributes_[config_.attribute_count++];
      a = {CLUSTER_DIMENSION, {}, {}};
      a.value.cluster[0] = cluster, a.value.cluster[1] = a.value.cluster[2] = 1;
    }
  }
  void operator()(uint64_t stream, Arguments& arguments) const;
  void make(uint64_t stream, Arguments& arguments) const {
    LaunchConfig config = config_;
    LaunchAttribute attributes[2] = {attributes_[0], attributes_[1]};
    config.stream = reinterpret_cast<void*>(stream), config.attributes = attributes;
    // The kernel's device need not be the current one, and a thread of autograd has none before its first call of CUDA's runtime.
    void* current = nullptr;
    driver().get_current(&current);
    if (current != context_) check(driver().set_current(context_), "a device");
    const int error = driver().launch(&config, function_, arguments.pointers(), nullptr);
    if (current && current != context_) driver().set_current(current);
    check(error, "launching a kernel");
  }
  std::string layout;

 private:
  void *function_, *context_;
  LaunchConfig config_;
  LaunchAttribute attributes_[2] = {};
};

// Launches with their arguments, recorded once and made as often as one likes, on any stream.
class Program {
 public:
  void begin() {
    if (recording) throw std::logic_error("a program is being recorded");
    recording = this;
  }
  void end() { recording = nullptr; }
  void add(const NativeLaunch& launch, const Arguments& arguments) { launches_.emplace_back(launch, arguments); }
  void run(uint64_t stream) {
    for (auto& [launch, arguments] : launches_) launch.make(stream, arguments);
  }
  size_t size() const { return launches_.size(); }

 private:
  std::vector<std::pair<NativeLaunch, Arguments>> launches_;
};

void NativeLaunch::operator()(uint64_t stream, Arguments& arguments) const {
  if (recording) recording->add(*this, arguments);
  else make(stream, arguments);
}

// What x is made of, as Python counts it.
enum Numbers { FLOAT16, BFLOAT16, BYTES };

// x [rows, k] in boxes of `box_rows` by 128 bytes, or 1 by 256; outside of x are zeros. stride: numbers from row to row.
TensorMap tensor_map(uint64_t pointer, int numbers, uint64_t rows, uint64_t k, uint64_t stride, uint32_t box_rows) {
  constexpr int TYPES[] = {6, 9, 0}, NO_INTERLEAVE = 0, NO_SWIZZLE = 0, SWIZZLE_128B = 3, PROMOTE_256B = 3, FILL_ZEROS = 0;
  const uint32_t size = numbers == BYTES ? 1 : 2;
  TensorMap map;
  const uint64_t sizes[2] = {k, rows}, strides[1] = {stride * size};
  const uint32_t box[2] = {(box_rows == 1 ? 256u : 128u) / size, box_rows}, ones[2] = {1, 1};
  check(driver().encode_tiled(&map, TYPES[numbers], 2, reinterpret_cast<void*>(pointer), sizes, strides, box, ones, NO_INTERLEAVE,
                              box_rows == 1 ? NO_SWIZZLE : SWIZZLE_128B, PROMOTE_256B, FILL_ZEROS),
        "a tensor map of x");
  return map;
}

// y [m, n] = x [m, k] W^T with the bricks of one matrix, in a shape of a gemm that was planned for m rows. All gemms take the same arguments; that
// of x in bytes also takes a part of y's columns, as the first one of its places and how many they are, and one with a folded norm takes what
// folded_norm.cuh says, with each call.
class NativeProduct {
 public:
  NativeProduct(const NativeLaunch& launch, uint64_t bricks, uint64_t row_scale, int m, int n, int k, int numbers, uint32_t box_rows, int first_place, int places)
      : launch_(launch), arguments_(launch.layout), m_(m), k_(k), numbers_(numbers), box_rows_(box_rows) {
    if (launch.layout != (numbers == BYTES ? "mpppppiiiiii" : "mpppppiiii") && launch.layout != "mpppppiiiippppff") throw std::invalid_argument("a launch of a gemm");
    arguments_.put(0, TensorMap{}), arguments_.put(1, bricks), arguments_.put(2, row_scale), arguments_.put(6, m), arguments_.put(7, n), arguments_.put(8, k);
    if (numbers == BYTES) arguments_.put(10, first_place), arguments_.put(11, places);
  }
  // box_rows 0: the kernel is one of a GPU before Hopper, and reads no tensor map.
  void operator()(uint64_t stream, uint64_t x, int x_stride, uint64_t bias, uint64_t y, const nb::args& norm) {
    if (box_rows_ && (x != x_ || x_stride != x_stride_)) {
      arguments_.put(0, tensor_map(x, numbers_, uint64_t(m_), uint64_t(k_), uint64_t(x_stride), box_rows_));
      x_ = x, x_stride_ = x_stride;
    }
    arguments_.put(3, x), arguments_.put(4, bias), arguments_.put(5, y), arguments_.put(9, x_stride);
    if (norm.size() != (launch_.layout.back() == 'f' ? 6u : 0u)) throw std::invalid_argument("a folded norm");
    for (size_t i = 0; i < norm.size(); i++) arguments_.set(10 + i, norm[i]);
    launch_(stream, arguments_);
  }

 private:
  NativeLaunch launch_;
  Arguments arguments_;
  int m_, k_, numbers_;
  uint32_t box_rows_;
  uint64_t x_ = 0;  // of the tensor map that `arguments_` has
  int x_stride_ = -1;
};

}  // namespace
}  // namespace billfish::cuda

NB_MODULE(_cuda, module) {
  using namespace billfish::cuda;
  nb::exception<DriverError>(module, "DriverError", nb::module_::import_("billfish.core.errors").attr("BillfishError"));
  nb::class_<TensorMap>(module, "TensorMap").def(nb::init<>());
  module.def("tensor_map", &tensor_map);
  nb::class_<NativeLaunch>(module, "NativeLaunch")
      .def(nb::init<uint64_t, uint64_t, std::tuple<unsigned, unsigned, unsigned>, unsigned, unsigned, unsigned, bool, const std::string&>())
      .def("__call__", [](const NativeLaunch& launch, uint64_t stream, const nb::args& values) {
        Arguments arguments(launch.layout);
        arguments.set(values);
        launch(stream, arguments);
      });
  nb::class_<Program>(module, "Program")
      .def(nb::init<>())
      .def("begin", &Program::begin)
      .def("end", &Program::end)
      .def("__len__", &Program::size)
      .def("__call__", &Program::run, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<NativeProduct>(module, "NativeProduct")
      .def(nb::init<const NativeLaunch&, uint64_t, uint64_t, int, int, int, int, uint32_t, int, int>(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg("first_place") = 0, nb::arg("places") = -1)
      .def("__call__", &NativeProduct::operator());
}
