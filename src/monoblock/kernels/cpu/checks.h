// Checks of arguments.  Every operator refuses what it cannot read before it touches memory: sizes, strides, dtypes,
// devices and small indices, in one line that names the argument, what was given and what is needed.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "simd.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

// The name of an argument, or of one element of a list: keys, keys[3].  Put into words only when a check fails.
struct Argument {
  const char* name;
  int64_t index = -1;
  Argument(const char* text, int64_t n = -1) : name(text), index(n) {}  // from a literal
};

inline std::ostream& operator<<(std::ostream& out, const Argument& a) {
  out << a.name;
  return a.index < 0 ? out : out << "[" << a.index << "]";
}

constexpr int64_t ANY = -1;  // a size that is not checked

// "(2, any, 8)"
inline std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i)
    text += (i ? ", " : "") + (sizes[i] == ANY ? std::string("any") : std::to_string(sizes[i]));
  return text + ")";
}

// Elements of the storage that the sizes and strides of a tensor reach.
inline int64_t reached_elements(const at::Tensor& t) {
  if (!t.numel()) return 0;
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return last + 1;
}

// Whether a tensor is dense, on the CPU, and its own memory holds its elements.  All others have more dispatch keys:
// other layouts and devices, subclasses with __torch_dispatch__ (as FakeTensor), tensors wrapped by torch.func, lazy
// negation and conjugation, zeros without memory.
inline bool is_plain(const at::Tensor& t) {
  static const c10::DispatchKeySet plain_keys =
      c10::DispatchKeySet(c10::DispatchKey::CPU) |
      c10::getAutogradRelatedKeySetFromBackend(c10::BackendComponent::CPUBit) |
      c10::getAutocastRelatedKeySetFromBackend(c10::BackendComponent::CPUBit);
  return plain_keys.has_all(t.key_set());
}

// A plain tensor whose memory is all there.
template <class Name>
void check_memory(const Name& name, const at::Tensor& t) {
  TORCH_CHECK(t.defined(), name, " is None; a tensor is needed");
  TORCH_CHECK(is_plain(t), name, " is a ", t.layout(), " tensor on ", t.device(), " with dispatch keys ", t.key_set(),
              "; a plain tensor on the CPU is needed");
  TORCH_CHECK(size_t(reached_elements(t)) * t.itemsize() <= t.storage().nbytes(), name,
              " reaches beyond its storage, which was resized; give a new tensor");
  TORCH_CHECK(!t.numel() || t.const_data_ptr(), name, " has a null data pointer; give a tensor with memory");
}

template <class Name>
void check_dtype(const Name& name, const at::Tensor& t, at::ScalarType dtype) {
  check_memory(name, t);
  TORCH_CHECK(t.scalar_type() == dtype, name, " has dtype ", t.scalar_type(), "; ", dtype, " is needed");
}

template <class Name>
void check_shape(const Name& name, const at::Tensor& t, std::initializer_list<int64_t> sizes) {
  bool is_equal = t.dim() == int64_t(sizes.size());
  for (int64_t d = 0; is_equal && d < t.dim(); ++d) is_equal = sizes.begin()[d] == ANY || t.size(d) == sizes.begin()[d];
  TORCH_CHECK(is_equal, name, " has shape ", shape_text(t.sizes()), "; ", shape_text(sizes), " is needed");
}

template <class Name>
void check_contiguous(const Name& name, const at::Tensor& t) {
  TORCH_CHECK(t.is_contiguous(), name, " with strides ", shape_text(t.strides()),
              " is not contiguous; call contiguous()");
}

template <class Name>
void check_tensor(const Name& name, const at::Tensor& t, at::ScalarType dtype, std::initializer_list<int64_t> sizes) {
  check_dtype(name, t, dtype);
  check_shape(name, t, sizes);
  check_contiguous(name, t);
}

// Keys, values or queries (rows, heads, columns, size) in fp32, the last axis in one piece.
template <class Name>
void check_heads(const Name& name, const at::Tensor& t, std::initializer_list<int64_t> sizes) {
  check_dtype(name, t, at::kFloat);
  check_shape(name, t, sizes);
  TORCH_CHECK(t.stride(3) == 1 || t.size(3) <= 1, name, " with strides ", shape_text(t.strides()),
              " has gaps in its last axis; call contiguous()");
}

inline void check_count(const Argument& name, size_t given, size_t needed, const char* of) {
  TORCH_CHECK(given == needed, name, " has ", given, " elements; one for each ", of, " is needed, ", needed, " in all");
}

template <class Name>
void check_range(const Name& name, int64_t value, int64_t least, int64_t most) {
  TORCH_CHECK(value >= least && value <= most, name, " is ", value, "; a number from ", least, " to ", most,
              " is needed");
}

// The largest integer to which activations of so many bits are rounded.
template <class Name>
int activation_limit(const Name& name, int64_t bits) {
  TORCH_CHECK(bits == 16 || bits == 8, name, " is ", bits, "; 16 or 8 is needed");
  return bits == 8 ? LIMIT_8_BITS : LIMIT_16_BITS;
}

// Quantized rows of `columns` weights in groups of whole chunks, of which the last may be padding behind the inputs.
template <class Name>
void check_groups(const Name& name, int64_t columns, int64_t groups, int64_t inputs) {
  TORCH_CHECK(groups > 0 && columns > 0 && columns % (CHUNK * groups) == 0, name, " has ", columns, " columns in ",
              groups, " groups; groups of a multiple of ", CHUNK, " are needed");
  TORCH_CHECK(inputs == ANY || (inputs <= columns && inputs > columns - columns / groups), name, " has ", columns,
              " columns in ", groups, " groups, which do not fit ", inputs, " inputs");
}

constexpr int64_t MAX_SIZE = int64_t(1) << 40;  // larger numbers of elements are refused before they overflow

inline const float* fp32_or_null(const OptionalTensor& t) { return t ? t->const_data_ptr<float>() : nullptr; }

// Tensors to which pointers are kept.  Memory that moved since (share_memory_, a resized storage) is refused.
class PinnedTensors {
 public:
  const void* add(const at::Tensor& t) {
    tensors.push_back(t), addresses.push_back(t.const_data_ptr());
    return addresses.back();
  }

  void check(const char* owner) const {
    for (size_t n = 0; n < tensors.size(); ++n)
      TORCH_CHECK(tensors[n].const_data_ptr() == addresses[n], "a tensor of this ", owner,
                  " has moved in memory since it was built; build it again");
  }

 private:
  Tensors tensors;
  std::vector<const void*> addresses;
};

}  // namespace
