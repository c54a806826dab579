// The weights and options of a stack of blocks, read once from named fields: weights as pointers, options as numbers.
//
// No weight is copied.  A NativeStack keeps the tensors alive and sees every change that is made in place, such as an
// optimizer's; a weight that is replaced by another tensor needs a new NativeStack.  Nothing changes after it is built,
// so threads may share it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include <initializer_list>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "linear/integer_panels.h"
#include "stack/activations.h"

namespace {

using FieldDict = c10::Dict<std::string, c10::IValue>;

// Named fields of a dictionary that comes from Python, each read once by its name.  A field that is missing, of another
// type or never read is an error that names it.
class Fields {
 public:
  // `owner` says whose fields these are, for errors: "blocks[2]".
  Fields(FieldDict dict, std::string owner) : fields(std::move(dict)), owner(std::move(owner)) {}

  std::string name(const std::string& field) const { return owner + "['" + field + "']"; }

  // Whether an optional field is there; None stands for absent.
  bool has(const std::string& field) {
    used.insert(field);
    const auto at = fields.find(field);
    return at != fields.end() && !at->value().isNone();
  }

  int64_t integer(const std::string& field, int64_t least, int64_t most) {
    const c10::IValue value = read(field);
    TORCH_CHECK(value.isInt(), name(field), " is of type ", value.tagKind(), "; an int is needed");
    check_range(name(field), value.toInt(), least, most);
    return value.toInt();
  }

  float real(const std::string& field) {
    const c10::IValue value = read(field);
    TORCH_CHECK(value.isDouble() || value.isInt(), name(field), " is of type ", value.tagKind(), "; a float is needed");
    return float(value.isInt() ? double(value.toInt()) : value.toDouble());
  }

  bool flag(const std::string& field) {
    const c10::IValue value = read(field);
    TORCH_CHECK(value.isBool(), name(field), " is of type ", value.tagKind(), "; a bool is needed");
    return value.toBool();
  }

  // The position of a word in the list of those that are known.
  int choice(const std::string& field, std::initializer_list<const char*> words) {
    const c10::IValue value = read(field);
    TORCH_CHECK(value.isString(), name(field), " is of type ", value.tagKind(), "; a str is needed");
    int number = 0;
    std::string known;
    for (const char* word : words) {
      if (value.toStringRef() == word) return number;
      known += (number++ ? ", " : "") + std::string(word);
    }
    TORCH_CHECK(false, name(field), " is '", value.toStringRef(), "'; one of ", known, " is needed");
  }

  at::Tensor tensor(const std::string& field) {
    const c10::IValue value = read(field);
    TORCH_CHECK(value.isTensor(), name(field), " is of type ", value.tagKind(), "; a tensor is needed");
    check_memory(name(field), value.toTensor());
    return value.toTensor();
  }

  void check_all_read() const {
    for (const auto& entry : fields)
      TORCH_CHECK(used.count(entry.key()), name(entry.key()), " is not a field that is read here");
  }

 private:
  FieldDict fields;
  std::string owner;
  std::set<std::string> used;

  c10::IValue read(const std::string& field) {
    TORCH_CHECK(has(field), name(field), " is missing");
    return fields.at(field);
  }
};

// -- weights and options ----------------------------------------------------------------------------------------------

struct WeightMatrix {
  enum Format { NONE, DENSE, INT8, INT4 } format = NONE;
  const void* weight = nullptr;
  const uint16_t *scale = nullptr, *least = nullptr;  // bfloat16 (rows, groups)
  const float* bias = nullptr;
  int64_t rows = 0, columns = 0, groups = 1;  // columns as stored: inputs filled up to whole groups
  int limit = LIMIT_16_BITS;                  // of the integers to which x is rounded, if the weight is quantized

  bool is_quantized() const { return format == INT8 || format == INT4; }

  // The rows from low to high.
  WeightMatrix between(int64_t low, int64_t high) const {
    WeightMatrix part = *this;
    const int64_t bytes = format == DENSE ? 4 * columns : format == INT8 ? columns : columns / 2;
    part.weight = static_cast<const char*>(weight) + low * bytes, part.rows = high - low;
    if (bias) part.bias += low;
    if (scale) part.scale += low * groups;
    if (least) part.least += low * groups;
    return part;
  }

  // How x is rounded for a product: products of the same x that agree in this share the integers.
  struct Packing {
    int64_t group = 0;
    int limit = 0;  // 0: not at all
    bool operator==(const Packing&) const = default;
  };
  Packing packing() const { return {columns / groups, is_quantized() ? limit : 0}; }
};

// use(format) for a quantized matrix.
template <class Use>
inline void with_format(const WeightMatrix& m, Use use) {
  if (m.format == WeightMatrix::INT8)
    return use(Int8Format{static_cast<const int8_t*>(m.weight), m.scale, m.columns, m.groups});
  use(Int4Format{static_cast<const uint8_t*>(m.weight), m.scale, m.least, m.columns, m.groups});
}

struct Sublayer {
  Norm norm, output_norm;
  const float* gain = nullptr;  // LayerScale (Touvron et al. 2021)
};

enum NormPlace { PRE, POST, OUTPUT, SANDWICH };
enum Residual { SEQUENTIAL, PARALLEL, PARALLEL_SHARED };
enum QueryKeyNorm { NO_QK_NORM, PER_HEAD, EACH_HEAD, WIDTH };  // one weight for all heads, one a head, all at once

struct Layer {
  int norm_place, residual, qk_norm, activation;
  int64_t heads, kv_heads, window, rotary_table, bias_table, cross_heads, cross_kv_heads;  // tables: -1 for none
  bool rotary_interleaved;
  float scale, cross_scale, residual_scale;
  float softcap, clip, clamp;  // 0 for none
  Sublayer attention, cross, feedforward;
  WeightMatrix query, key, value, output, cross_query, cross_output, gate, up, down;
  Norm query_norm, key_norm;
  const float* sinks = nullptr;

  int64_t key_size() const { return key.rows / kv_heads; }
  int64_t value_size() const { return value.rows / kv_heads; }
};

constexpr int64_t MAX_HEADS = 1 << 20;

// Whether values of sources fit the matrix of cross-attention that reads them.
inline void check_source(const Layer& l, const at::Tensor& values, size_t number) {
  const int64_t inputs = values.size(3) * l.cross_heads, group = l.cross_output.columns / l.cross_output.groups;
  const int64_t padding = l.cross_output.columns - inputs;  // to whole groups, where the matrix is quantized
  TORCH_CHECK(padding == 0 || (padding > 0 && padding < group && l.cross_output.format != WeightMatrix::DENSE),
              Argument("source_values", number), " has heads of ", values.size(3), ", ", inputs,
              " numbers in all; cross.output reads ", l.cross_output.columns);
}

class LayerReader {
 public:
  LayerReader(Fields& fields, PinnedTensors& pinned, int64_t width) : fields(fields), pinned(pinned), width(width) {}

  Layer read() {
    Layer l{};
    read_options(l);
    l.attention = sublayer("attention"), l.feedforward = sublayer("feedforward");
    read_attention(l);
    if (l.cross_heads) read_cross(l);
    if (fields.has("feedforward.gate.weight")) l.gate = matrix("feedforward.gate", width, ANY);
    l.up = matrix("feedforward.up", width, l.gate.format ? l.gate.rows : ANY);
    l.down = matrix("feedforward.down", l.up.rows, width);
    fields.check_all_read();
    return l;
  }

  // Weights of `size` numbers in all; with several heads, (heads, size / heads).
  Norm norm(const std::string& name, int64_t size, int64_t heads = 0) {
    Norm n;
    if (!fields.has(name + ".kind")) return n;
    n.kind = fields.choice(name + ".kind", {"layer", "rms"}) + 1;
    n.offset = fields.flag(name + ".unit_offset"), n.eps = fields.real(name + ".eps");
    n.weight = vector(name + ".weight", size, heads), n.bias = vector(name + ".bias", size, heads);
    return n;
  }

 private:
  Fields& fields;
  PinnedTensors& pinned;
  const int64_t width;

  void read_options(Layer& l) {
    l.norm_place = fields.choice("norm_place", {"pre", "post", "output", "sandwich"});
    l.residual = fields.choice("residual", {"sequential", "parallel", "parallel_shared"});
    l.activation = fields.choice("activation", ACTIVATION_NAMES);
    l.heads = fields.integer("attention.heads", 1, MAX_HEADS);
    l.kv_heads = fields.integer("attention.kv_heads", 1, l.heads);
    l.window = fields.integer("attention.window", 0, MAX_SIZE);
    l.rotary_table = fields.integer("attention.rotary_table", -1, MAX_HEADS);
    l.rotary_interleaved = fields.flag("attention.rotary_interleaved");
    l.bias_table = fields.integer("attention.bias_table", -1, MAX_HEADS);
    l.scale = fields.real("attention.scale"), l.softcap = fields.real("attention.softcap");
    l.clip = fields.real("attention.clip"), l.clamp = fields.real("feedforward.clamp");
    l.residual_scale = fields.real("residual_scale");
    l.qk_norm =
        fields.has("attention.qk_norm") ? 1 + fields.choice("attention.qk_norm", {"head", "each_head", "width"}) : 0;
    l.cross_heads = fields.has("cross.heads") ? fields.integer("cross.heads", 1, MAX_HEADS) : 0;
    check(l.heads % l.kv_heads == 0, "attention.kv_heads", "does not divide attention.heads", l.kv_heads, l.heads);
    TORCH_CHECK(!l.cross_heads || l.residual == SEQUENTIAL, fields.name("cross.heads"),
                " is given beside a parallel residual, which has no cross-attention; leave it out");
  }

  void read_attention(Layer& l) {
    l.query = matrix("attention.query", width, ANY), l.key = matrix("attention.key", width, ANY);
    l.value = matrix("attention.value", width, ANY);
    check(l.query.rows % l.heads == 0, "attention.heads", "does not divide the rows of attention.query", l.heads,
          l.query.rows);
    check(l.key.rows == l.query.rows / l.heads * l.kv_heads, "attention.key.weight",
          "does not have the head size of attention.query for each key head", l.key.rows,
          l.query.rows / l.heads * l.kv_heads);
    check(l.value.rows % l.kv_heads == 0, "attention.kv_heads", "does not divide the rows of attention.value",
          l.kv_heads, l.value.rows);
    l.output = matrix("attention.output", l.value_size() * l.heads, width);
    const int64_t K = l.key_size();
    const auto head_norm = [&](const char* name, int64_t rows, int64_t heads) {
      return norm(name, l.qk_norm == PER_HEAD ? K : rows, l.qk_norm == EACH_HEAD ? heads : 0);
    };
    if (l.qk_norm) l.query_norm = head_norm("attention.query_norm", l.query.rows, l.heads);
    if (l.qk_norm) l.key_norm = head_norm("attention.key_norm", l.key.rows, l.kv_heads);
    l.sinks = vector("attention.sinks", l.heads);
  }

  // The keys and values of a source are computed elsewhere, so only the query and the output are weights here.
  void read_cross(Layer& l) {
    l.cross_kv_heads = fields.integer("cross.kv_heads", 1, l.cross_heads), l.cross_scale = fields.real("cross.scale");
    check(l.cross_heads % l.cross_kv_heads == 0, "cross.kv_heads", "does not divide cross.heads", l.cross_kv_heads,
          l.cross_heads);
    l.cross = sublayer("cross");
    l.cross_query = matrix("cross.query", width, ANY), l.cross_output = matrix("cross.output", ANY, width);
    check(l.cross_query.rows % l.cross_heads == 0, "cross.heads", "does not divide the rows of cross.query",
          l.cross_heads, l.cross_query.rows);
  }

  Sublayer sublayer(const std::string& name) {
    return {norm(name + "_norm", width), norm(name + "_output_norm", width), vector(name + "_gain", width)};
  }

  void check(bool is_right, const char* field, const char* problem, int64_t given, int64_t other) const {
    TORCH_CHECK(is_right, fields.name(field), " ", problem, " (", given, " and ", other, ")");
  }

  // An optional fp32 vector (size,), or (heads, size / heads).
  const float* vector(const std::string& field, int64_t size, int64_t heads = 0) {
    if (!fields.has(field)) return nullptr;
    const at::Tensor t = fields.tensor(field);
    const std::string name = fields.name(field);
    check_dtype(name, t, at::kFloat), check_contiguous(name, t);
    const bool is_matrix = heads && t.dim() == 2;  // the same numbers in the same order as (size,)
    is_matrix ? check_shape(name, t, {heads, size / heads}) : check_shape(name, t, {size});
    return static_cast<const float*>(pinned.add(t));
  }

  const uint16_t* group_values(const std::string& field, const WeightMatrix& m) {
    const at::Tensor t = fields.tensor(field);
    check_tensor(fields.name(field), t, at::kBFloat16, {m.rows, m.groups});
    return static_cast<const uint16_t*>(pinned.add(t));
  }

  WeightMatrix matrix(const std::string& field, int64_t inputs, int64_t rows) {
    WeightMatrix m;
    const at::Tensor weight = fields.tensor(field + ".weight");
    const std::string name = fields.name(field + ".weight");
    const auto type = weight.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kChar || type == at::kByte, name, " has dtype ", type,
                "; Float, Char (8 bits) or Byte (4 bits) is needed");
    m.format = type == at::kFloat ? WeightMatrix::DENSE : type == at::kChar ? WeightMatrix::INT8 : WeightMatrix::INT4;
    check_shape(name, weight, {rows, ANY}), check_contiguous(name, weight);
    m.weight = pinned.add(weight);
    m.rows = weight.size(0), m.columns = weight.size(1) * (m.format == WeightMatrix::INT4 ? 2 : 1);
    TORCH_CHECK(m.rows > 0 && m.columns > 0, name, " has shape ", shape_text(weight.sizes()), "; it must not be empty");
    if (m.format == WeightMatrix::DENSE) {
      TORCH_CHECK(inputs == ANY || m.columns == inputs, name, " has ", m.columns, " columns; ", inputs, " are needed");
    } else {
      const at::Tensor scale = fields.tensor(field + ".scale");
      check_shape(fields.name(field + ".scale"), scale, {m.rows, ANY});
      m.groups = scale.size(1);
      check_groups(name, m.columns, m.groups, inputs);
      m.scale = group_values(field + ".scale", m);
      if (m.format == WeightMatrix::INT4) m.least = group_values(field + ".least", m);
      const std::string bits = field + ".activation_bits";
      m.limit = activation_limit(fields.name(bits), fields.integer(bits, 8, 16));
    }
    m.bias = vector(field + ".bias", m.rows);
    return m;
  }
};

class NativeStack : public torch::CustomClassHolder {
 public:
  std::vector<Layer> layers;
  Norm norm;                                              // behind the last block
  const int64_t width;                                    // D
  int64_t max_inputs = 0, max_hidden = 0, max_heads = 0;  // row strides of what the products read

  NativeStack(int64_t width, const std::vector<FieldDict>& blocks, const FieldDict& norm_fields) : width(width) {
    check_range("width", width, 1, MAX_SIZE);
    TORCH_CHECK(!blocks.empty(), "blocks is empty; a stack has one or more");
    for (size_t n = 0; n < blocks.size(); ++n) {
      Fields fields(blocks[n], "blocks[" + std::to_string(n) + "]");
      layers.push_back(LayerReader(fields, pinned, width).read());
      measure(layers.back());
    }
    Fields fields(norm_fields, "norm");
    norm = LayerReader(fields, pinned, width).norm("norm", width);
    fields.check_all_read();
  }

  void check_weights() const { pinned.check("NativeStack"); }

 private:
  PinnedTensors pinned;

  void measure(const Layer& l) {
    max_inputs = std::max({max_inputs, width, l.query.columns, l.key.columns, l.value.columns, l.cross_query.columns,
                           l.up.columns, l.gate.columns});
    max_heads = std::max({max_heads, l.value_size() * l.heads, l.output.columns, l.cross_output.columns});
    max_hidden = std::max({max_hidden, l.up.rows, l.down.columns});
  }
};

}  // namespace
