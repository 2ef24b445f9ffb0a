// The decoder, for Python. Arguments have been checked by the Python side.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "bind/bind.h"
#include "decoder/decoder.h"
#include "threads/threads.h"

namespace nb = nanobind;
using namespace billfish;

namespace {

using Numbers = Contiguous<const float>;
using Order = Contiguous<const int32_t>;
// Packed weights and, where there are any, the bias and the order of their columns. Matrices with one order share its array.
using PackedMatrix = std::tuple<Description, Contiguous<const uint8_t>, std::optional<Numbers>, std::optional<Order>>;

// The router; gate, up and down; then as in Mixture.
using PackedMixture = std::tuple<PackedMatrix, std::vector<ExpertArrays>, int64_t, bool, float, std::optional<Numbers>>;

// Keys, values (both float32 or both float16), start, count.
using KeysOrValues = nb::ndarray<nb::c_contig, nb::device::cpu>;
using PythonPassage = std::tuple<KeysOrValues, KeysOrValues, int64_t, int64_t>;

std::vector<Passage> passages_of(const std::vector<PythonPassage>& rows) {
  std::vector<Passage> passages;
  for (const auto& [keys, values, start, count] : rows)
    passages.push_back({{keys.data(), values.data(), keys.dtype().bits == 16, int64_t(keys.shape(2)) * CACHE_BLOCK}, start, count});
  return passages;
}

// A Decoder and the arrays that it points into.
class PythonDecoder {
 public:
  PythonDecoder(const std::string& level, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_size, int64_t feed_forward,
                float epsilon, float query_scale, float residual_scale, float attention_cap, float logit_cap, bool adjacent, int gate,
                bool joint_norms,
                const std::vector<std::tuple<std::vector<double>, double>>& rotations)
      : level_(find_level(level)), decoder_(level_, *level_.decoder,
                 {hidden, heads, kv_heads, head_size, feed_forward, epsilon, query_scale, residual_scale, attention_cap, logit_cap, adjacent,
                  Gate(gate), joint_norms},
                 rotations_of(rotations)) {}

  // vectors: as in LayerVectors. matrices: as in Layer; of layers with a mixture but no shared expert, the first four.
  void add_layer(const std::vector<std::optional<Numbers>>& vectors, int64_t window, int rotation, const std::vector<PackedMatrix>& matrices,
                 const std::optional<PackedMixture>& mixture) {
    const float* v[7];
    for (size_t i = 0; i < 7; i++) v[i] = keep(vectors[i]);
    Matrix m[7]{};
    for (size_t i = 0; i < matrices.size(); i++) m[i] = keep(matrices[i]);
    Layer layer{{v[0], v[1], v[2], v[3], v[4], v[5], v[6]}, window, rotation, m[0], m[1], m[2], m[3], m[4], m[5], m[6], {}};
    if (mixture) {
      const auto& [router, stacks, chosen, renormalized, scale, shared_gate] = *mixture;
      layer.mixture = Mixture{keep(router), keep(stacks[0]), keep(stacks[1]), keep(stacks[2]), chosen, renormalized, scale, keep(shared_gate)};
    }
    decoder_.add_layer(layer);
  }

  void set_embedding(Contiguous<const uint8_t> blocks, nb::dict about) {
    streams_.push_back(blocks);
    embedding_ = storage_of(blocks.data(), about);
  }

  // Rows of the embedding, decoded.
  void embed(const std::vector<int64_t>& tokens, Contiguous<float> out) const {
    const Computing computing;
    for (size_t i = 0; i < tokens.size(); i++) {
      Storage row = embedding_;
      row.bytes += tokens[i] * row.row_bytes;
      level_.dequantize_rows(row, out.data() + int64_t(i) * row.k, 0, 0, 1);
    }
  }

  void set_head(Numbers norm, const PackedMatrix& matrix) { norm_ = keep(norm), head_ = keep(matrix); }

  void run(Contiguous<float> x, const std::vector<PythonPassage>& rows, int digits) const {
    const std::vector<Passage> passages = passages_of(rows);
    float* data = x.data();
    const Computing computing;
    decoder_.run(data, passages, digits);
  }

  // observe(layer, input, expert, rows [count, width]); the rows are there while it runs.
  void run_layers(Contiguous<float> x, const std::vector<PythonPassage>& rows, int digits, int64_t first, int64_t last,
                  std::optional<nb::callable> observe) const {
    const std::vector<Passage> passages = passages_of(rows);
    float* data = x.data();
    Observe told = nullptr;
    if (observe) told = [&](int64_t layer, LayerInput input, int64_t expert, const float* seen, int64_t count, int64_t width) {
      nb::gil_scoped_acquire python;
      (*observe)(layer, int(input), expert, nb::ndarray<nb::numpy, const float, nb::ndim<2>>(seen, {size_t(count), size_t(width)}, nb::none()));
    };
    const Computing computing;
    decoder_.run_layers(data, passages, digits, first, last, told);
  }

  void normalize(Numbers x, Contiguous<float> out) const {
    const float* data = x.data();
    const int64_t m = int64_t(x.shape(0));
    const Computing computing;
    decoder_.normalize(data, m, norm_, out.data());
  }

  // By name of the part.
  nb::dict seconds() const {
    nb::dict parts;
    for (int part = 0; part < PARTS; part++) parts[PART_NAMES[part]] = decoder_.seconds()[part];
    return parts;
  }

  void finish(Numbers x, int digits, Contiguous<float> out) const {
    const float* data = x.data();
    const int64_t m = int64_t(x.shape(0));
    const Computing computing;
    decoder_.finish(data, m, norm_, head_, digits, out.data());
  }

 private:
  static std::vector<Rotation> rotations_of(const std::vector<std::tuple<std::vector<double>, double>>& tables) {
    std::vector<Rotation> rotations;
    for (const auto& [frequencies, magnitude] : tables) rotations.push_back({frequencies, magnitude});
    return rotations;
  }
  const float* keep(const Numbers& array) {
    arrays_.push_back(array);
    return array.data();
  }
  const float* keep(const std::optional<Numbers>& array) { return array ? keep(*array) : nullptr; }
  Matrix keep(const PackedMatrix& matrix) {
    const auto& [description, stream, bias, order] = matrix;
    streams_.push_back(stream);
    Weights weights = description.weights(level_, stream.data());
    if (order) orders_.push_back(*order), weights.order = order->data();
    return {weights, keep(bias)};
  }
  ExpertStack keep(const ExpertArrays& arrays) {
    const auto& [description, stream, experts, factors, biases] = arrays;
    streams_.push_back(stream), keep(factors), keep(biases);
    return expert_stack(level_, arrays);
  }

  const Level& level_;
  Decoder decoder_;
  Storage embedding_{};
  const float* norm_ = nullptr;
  Matrix head_{};
  std::vector<Numbers> arrays_;
  std::vector<Contiguous<const uint8_t>> streams_;
  std::vector<Order> orders_;
};

// sums [k, k] += x^T x for x [rows, k], on and above the diagonal. Each sum has one order, whoever computes it.
void add_outer(const std::string& level, Numbers x, Contiguous<float> sums) {
  const DecoderKernels& kernels = *find_level(level).decoder;
  const int64_t rows = int64_t(x.shape(0)), k = int64_t(x.shape(1)), padded = (rows + 3) / 4 * 4, sixteens = (k + 15) / 16;
  const float* data = x.data();
  float* out = sums.data();
  const Computing computing;
  std::vector<float> columns(size_t(sixteens * 16 * padded));  // x transposed, with zeros behind rows and columns
  parallel_for(sixteens, [&](int64_t first, int64_t last) {
    for (int64_t j = first * 16; j < std::min(last * 16, k); j++)
      for (int64_t row = 0; row < rows; row++) columns[size_t(j * padded + row)] = data[row * k + j];
  });
  parallel_for(sixteens, [&](int64_t first, int64_t last) {
    for (int64_t sixteen = first; sixteen < last; sixteen++) kernels.add_outer(data, columns.data(), rows, k, sixteen, out);
  });
}

}  // namespace

void billfish::bind_decoder(nb::module_& module) {
  nb::class_<PythonDecoder>(module, "Decoder")
      .def(nb::init<const std::string&, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float, float, bool, int, bool,
                    const std::vector<std::tuple<std::vector<double>, double>>&>(),
           nb::arg("level"), nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_size"), nb::arg("feed_forward"),
           nb::arg("epsilon"), nb::arg("query_scale"), nb::arg("residual_scale"), nb::arg("attention_cap"), nb::arg("logit_cap"),
           nb::arg("adjacent"), nb::arg("gate"), nb::arg("joint_norms"), nb::arg("rotations"))
      .def("add_layer", &PythonDecoder::add_layer, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("set_embedding", &PythonDecoder::set_embedding)
      .def("embed", &PythonDecoder::embed)
      .def("set_head", &PythonDecoder::set_head)
      .def("run", &PythonDecoder::run)
      .def("run_layers", &PythonDecoder::run_layers, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("normalize", &PythonDecoder::normalize)
      .def("finish", &PythonDecoder::finish)
      .def("seconds", &PythonDecoder::seconds);
  module.def("add_outer", &add_outer);
  module.attr("CACHE_BLOCK") = CACHE_BLOCK;
  module.attr("BEST_OF_16") = BEST_OF_16;
  module.attr("FEW_ROWS") = MANY_ROWS - 1;
}
