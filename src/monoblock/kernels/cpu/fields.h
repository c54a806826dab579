// Named fields of a dictionary that comes from Python, each read once by its name.  A field that is missing, of another
// type or never read is an error that names it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include <initializer_list>
#include <set>
#include <string>
#include <utility>

#include "checks.h"

namespace {

using FieldDict = c10::Dict<std::string, c10::IValue>;

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

}  // namespace
