// The decoder, for Python. Arguments have been checked by the Python side.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>

#include "bind/arguments.h"
#include "decoder/decoder.h"
#include "threads/threads.h"

namespace nb = nanobind;
using namespace billfish;

namespace {

using Numbers = Contiguous<const float>;
using Order = Contiguous<const int32_t>;
// Packed weights and, where there are any, the bias and the order of their columns. Matrices with one order share its array.
using PackedMatrix = std::tuple<Description, Contiguous<const uint8_t>, std::optional<Numbers>, std::optional<Order>>;

// A sequence's state, start, count.
using PythonPassage = std::tuple<const SequenceState*, int64_t, int64_t>;

std::vector<Passage> passages_of(const std::vector<PythonPassage>& rows) {
  std::vector<Passage> passages;
  for (const auto& [state, start, count] : rows) passages.push_back({state, start, count});
  return passages;
}

// Keys or values of a layer, in memory of the state: [kv_heads, blocks, numbers of a block], or bytes of a block where they are int8.
nb::ndarray<nb::numpy> numbers_of(nb::handle self, int64_t layer, bool keys) {
  const SequenceState& state = nb::cast<const SequenceState&>(self);
  const KeysAndValues& own = state.layer(layer);
  const HeadCache first = own.head(0);
  const bool floats = state.type() != CacheType::int8;
  const uint8_t bits = state.type() == CacheType::float32 ? 32 : floats ? 16 : 8;
  const nb::dlpack::dtype type{uint8_t(floats ? nb::dlpack::dtype_code::Float : nb::dlpack::dtype_code::UInt), bits, 1};
  const size_t numbers = head_bytes(state.type(), own.shape().head_size, CACHE_BLOCK) * 8 / bits;
  const size_t shape[3] = {size_t(own.shape().kv_heads), size_t(own.positions() / CACHE_BLOCK), numbers};
  return {keys ? first.keys : first.values, 3, shape, self, nullptr, type};
}

// A dictionary of Python, by field.
class Named {
 public:
  explicit Named(nb::dict fields) : fields_(std::move(fields)) {}
  template <class T> T get(const char* name) const { return nb::cast<T>(fields_[name]); }
  bool has(const char* name) const { return fields_.contains(name) && !fields_[name].is_none(); }
  bool is_dict(const char* name) const { return nb::isinstance<nb::dict>(fields_[name]); }
  Named part(const char* name) const { return Named(get<nb::dict>(name)); }

 private:
  nb::dict fields_;
};

// A Decoder and the arrays that it points into.
class PythonDecoder {
 public:
  PythonDecoder(const std::string& level, int64_t hidden, float epsilon, float logit_cap, const std::vector<nb::dict>& ropes)
      : level_(find_level(level)), decoder_(level_, *level_.decoder, {hidden, epsilon, logit_cap}, ropes_of(ropes)) {}

  // A block of billfish/models/description.py, as dictionaries with its fields. "kind" is the class of a part; tensors are arrays.
  void add_block(nb::dict block) {
    const Named b(std::move(block));
    std::optional<PerLayerInput> input;
    if (b.has("per_layer_input")) {
      const Named p = b.part("per_layer_input");
      input = PerLayerInput{matrix(p, "gate"), matrix(p, "projection"), vector(p, "post_norm"), Gate(p.get<int>("activation"))};
    }
    const float* output_scale = vector(b, "output_scale");
    decoder_.add_block({mixer(b.part("mixer")), feed_forward(b.part("feed_forward")), norm(b, "mixer_norm"), norm(b, "feed_forward_norm"),
                        vector(b, "mixer_post_norm"), vector(b, "feed_forward_post_norm"), b.get<float>("residual_scale"), input,
                        output_scale ? *output_scale : 1.0f});
  }

  // As PerLayerEmbedding has it.
  void set_per_layer_embedding(nb::dict about) {
    const Named p(std::move(about));
    per_layer_ = PerLayerEmbedding{p.get<int64_t>("size"), p.get<int64_t>("layers"), matrix(p, "projection"), vector(p, "norm"), p.get<float>("scale"),
                                   p.get<float>("projection_scale")};
  }

  // rows [m, layers * size] of the embedding per layer become the inputs of layers, in place.
  void add_layer_inputs(Numbers x, Contiguous<float> rows, int digits) const {
    const float* data = x.data();
    const int64_t m = int64_t(x.shape(0));
    const Computing computing;
    decoder_.add_layer_inputs(per_layer_, data, m, digits, rows.data());
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

  // The last norm, as a part of a block has it, and the head, if the model has one.
  void set_head(nb::dict last, std::optional<PackedMatrix> matrix) {
    norm_ = norm(Named(std::move(last)), "norm");
    if (matrix) head_ = keep(*matrix);
  }

  // Of matrices (layer, AdaptedMatrix): down [rank, k], up [rank, n], scale. Its number.
  int add_adapter(const std::vector<std::tuple<int64_t, int, Numbers, Numbers, float>>& parts) {
    Adapter adapter;
    adapter.layers.resize(size_t(decoder_.layers()));
    for (const auto& [layer, which, down, up, scale] : parts)
      adapter.layers[size_t(layer)][size_t(which)] = {keep(down), keep(up), int64_t(down.shape(0)), scale};
    return decoder_.add_adapter(std::move(adapter));
  }

  // layer_inputs [rows, layers, size]: what PerLayerInput multiplies; None for other models.
  void run(Contiguous<float> x, const std::vector<PythonPassage>& rows, int digits, std::optional<Numbers> layer_inputs) const {
    const std::vector<Passage> passages = passages_of(rows);
    float* data = x.data();
    const float* inputs = layer_inputs ? layer_inputs->data() : nullptr;
    const Computing computing;
    decoder_.run(data, inputs, passages, digits, 0, decoder_.layers(), nullptr);
  }

  // Layers [first, last). observe(layer, input, expert, rows [count, width]); the rows are there while it runs.
  void run_layers(Contiguous<float> x, const std::vector<PythonPassage>& rows, int digits, std::optional<Numbers> layer_inputs, int64_t first, int64_t last,
                  std::optional<nb::callable> observe) const {
    const std::vector<Passage> passages = passages_of(rows);
    float* data = x.data();
    const float* inputs = layer_inputs ? layer_inputs->data() : nullptr;
    Observe told = nullptr;
    if (observe) told = [&](int64_t layer, LayerInput input, int64_t expert, const float* seen, int64_t count, int64_t width) {
      nb::gil_scoped_acquire python;
      (*observe)(layer, int(input), expert, nb::ndarray<nb::numpy, const float, nb::ndim<2>>(seen, {size_t(count), size_t(width)}, nb::none()));
    };
    const Computing computing;
    decoder_.run(data, inputs, passages, digits, first, last, told);
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
  static std::vector<Rope> ropes_of(const std::vector<nb::dict>& tables) {
    std::vector<Rope> ropes;
    for (const nb::dict& table : tables) {
      const Named rope(table);
      ropes.push_back({rope.get<std::vector<double>>("frequencies"), rope.get<double>("magnitude"), rope.get<bool>("adjacent")});
    }
    return ropes;
  }

  // ---- parts of a block ------------------------------------------------------------------------------------------------

  Attention attention(const Named& a) {
    const int64_t heads = a.get<int64_t>("heads"), kv_heads = a.get<int64_t>("kv_heads"), size = a.get<int64_t>("head_size");
    std::optional<Matrix> k, v;
    if (a.has("k")) k = matrix(a, "k");
    if (a.has("v")) v = matrix(a, "v");
    const bool joint = a.has("q_norm") && int64_t(a.get<Numbers>("q_norm").shape(0)) != size;
    const float* v_norm = a.get<bool>("v_norm") ? ones_.emplace_back(size_t(size), 1.0f).data() : nullptr;
    const auto [growth, length] = a.has("temperature") ? a.get<std::tuple<float, int64_t>>("temperature") : std::tuple<float, int64_t>(0.0f, 1);
    return {heads, kv_heads, size, matrix(a, "q"), matrix(a, "output"), k, v, a.has("shares") ? a.get<int64_t>("shares") : a.get<bool>("bidirectional") ? 0 : decoder_.layers(),
            a.get<float>("scale"), a.get<float>("cap"), a.get<int64_t>("window"), a.has("rope") ? a.get<int>("rope") : -1,
            vector(a, "q_norm"), vector(a, "k_norm"), joint, v_norm, vector(a, "sinks"), a.get<bool>("gated"), growth, length, a.get<bool>("bidirectional")};
  }

  Mixer mixer(const Named& part) {
    const std::string kind = part.get<std::string>("kind");
    if (kind == "Attention") return attention(part);
    if (kind == "GatedDeltaNet")
      return GatedDeltaNet{part.get<int64_t>("key_heads"), part.get<int64_t>("value_heads"), part.get<int64_t>("key_size"), part.get<int64_t>("value_size"),
                           part.get<bool>("tiled"), matrix(part, "qkv"), matrix(part, "z"), matrix(part, "beta"), matrix(part, "alpha"), matrix(part, "output"),
                           convolution(part), vector(part, "decay"), vector(part, "step"), vector(part, "norm")};
    if (kind == "ShortConvolution") return ShortConvolution{matrix(part, "projection"), matrix(part, "output"), convolution(part)};
    return Mamba2{part.get<int64_t>("heads"), part.get<int64_t>("head_size"), part.get<int64_t>("state_size"), part.get<int64_t>("groups"),
                  matrix(part, "projection"), matrix(part, "output"), convolution(part), vector(part, "decay"), vector(part, "step"), vector(part, "skip"),
                  vector(part, "norm")};
  }

  // Weights [taps, channels], and the bias if there is one.
  Convolution convolution(const Named& part) {
    const auto [weight, bias] = part.get<std::tuple<Numbers, std::optional<Numbers>>>("convolution");
    return {keep(weight), keep(bias), int64_t(weight.shape(0)), int64_t(weight.shape(1))};
  }

  FeedForward feed_forward(const Named& part) {
    const std::string kind = part.get<std::string>("kind");
    if (kind == "Dense") return dense(part);
    if (kind == "Mixture") return mixture(part);
    return DenseAndMixture{dense(part.part("dense")), mixture(part.part("mixture")), vector(part, "dense_post_norm"), vector(part, "router_norm"),
                           vector(part, "mixture_norm"), vector(part, "mixture_post_norm")};
  }

  Dense dense(const Named& d) {
    std::optional<Matrix> up;
    if (d.has("up")) up = matrix(d, "up");
    return {matrix(d, "gate"), up, matrix(d, "down"), Gate(d.get<int>("activation"))};
  }

  Mixture mixture(const Named& m) {
    const Named r = m.part("router");
    std::optional<Dense> shared;
    if (m.has("shared")) shared = dense(m.part("shared"));
    const Routing routing{r.get<int64_t>("chosen"), r.get<std::string>("scores") == "sigmoid", r.get<bool>("renormalized"), r.get<float>("scale"),
                          vector(r, "selection_bias"), vector(r, "expert_scale"), r.get<int64_t>("groups"), r.get<int64_t>("groups_used")};
    std::optional<ExpertStack> up;
    if (m.has("up")) up = stack(m, "up");
    return {matrix(r, "matrix"), routing, stack(m, "gate"), stack(m, "down"), up, Gate(m.get<int>("activation")), shared, vector(m, "shared_gate")};
  }

  Matrix matrix(const Named& part, const char* name) { return keep(part.get<PackedMatrix>(name)); }
  ExpertStack stack(const Named& part, const char* name) { return keep(part.get<ExpertArrays>(name)); }
  const float* vector(const Named& part, const char* name) { return part.has(name) ? keep(part.get<Numbers>(name)) : nullptr; }

  // RMSNorm is a weight, LayerNorm a dictionary.
  Norm norm(const Named& part, const char* name) {
    if (!part.has(name)) return {};
    if (!part.is_dict(name)) return {vector(part, name), nullptr, false, false};
    const Named n = part.part(name);
    return {vector(n, "weight"), vector(n, "bias"), true, n.get<bool>("of_residual")};
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
  PerLayerEmbedding per_layer_{};
  Norm norm_{};
  Matrix head_{};
  std::vector<Numbers> arrays_;
  std::deque<std::vector<float>> ones_;  // weights of norms that have none
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

namespace billfish {

void bind_decoder(nb::module_& module) {
  nb::class_<SequenceState>(module, "SequenceState")
      .def("__init__", [](SequenceState* self, const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& shapes, int type, int64_t capacity) {
        std::vector<StateShape> layers;
        for (const auto& [kv_heads, head_size, window, numbers] : shapes) layers.push_back({kv_heads, head_size, window, numbers});
        new (self) SequenceState(layers, CacheType(type), capacity);
      }, nb::arg("shapes"), nb::arg("type"), nb::arg("capacity"))
      .def("reserve", &SequenceState::reserve, nb::arg("start"), nb::arg("count"), nb::arg("capacity"), nb::arg("message_ends"),
           nb::arg("drafted") = 0)
      .def("copy", &SequenceState::copy, nb::arg("other"), nb::arg("length"))
      .def("restorable", &SequenceState::restorable)
      .def_rw("adapter", &SequenceState::adapter)
      .def_prop_ro("capacity", &SequenceState::capacity)
      .def_prop_ro("nbytes", &SequenceState::bytes)
      .def_prop_ro("checkpoints", [](const SequenceState& self) { return self.checkpoints(); })
      .def("keys", [](nb::handle self, int64_t layer) { return numbers_of(self, layer, true); })
      .def("values", [](nb::handle self, int64_t layer) { return numbers_of(self, layer, false); });
  nb::class_<PythonDecoder>(module, "Decoder")
      .def(nb::init<const std::string&, int64_t, float, float, const std::vector<nb::dict>&>(), nb::arg("level"), nb::arg("hidden"), nb::arg("epsilon"),
           nb::arg("logit_cap"), nb::arg("ropes"))
      .def("add_block", &PythonDecoder::add_block)
      .def("add_adapter", &PythonDecoder::add_adapter)
      .def("set_per_layer_embedding", &PythonDecoder::set_per_layer_embedding)
      .def("add_layer_inputs", &PythonDecoder::add_layer_inputs)
      .def("set_embedding", &PythonDecoder::set_embedding)
      .def("embed", &PythonDecoder::embed)
      .def("set_head", &PythonDecoder::set_head, nb::arg(), nb::arg().none())
      .def("run", &PythonDecoder::run, nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("run_layers", &PythonDecoder::run_layers, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none())
      .def("normalize", &PythonDecoder::normalize)
      .def("finish", &PythonDecoder::finish)
      .def("seconds", &PythonDecoder::seconds);
  module.def("add_outer", &add_outer);
  module.attr("CACHE_BLOCK") = CACHE_BLOCK;
  module.attr("DELTA_CHUNK") = DELTA_CHUNK;
  module.attr("BEST_OF_16") = BEST_OF_16;
  module.attr("FEW_ROWS") = MANY_ROWS - 1;
}

}  // namespace billfish
