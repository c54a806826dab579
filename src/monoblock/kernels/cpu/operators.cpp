// Every operator and class that Python sees, with the names of its arguments.  This is the one file that is compiled:
// it includes all others, and its order is that in which classes must be known to those that take them as arguments.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "attention/causal_attention.h"
#include "stack/gelu.h"
#include "linear/linear.h"
#include "stack/pass.h"
#include "topk_continuations.h"

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  using torch::arg;

  // products and quantization
  library.def(
      "linear(Tensor x, Tensor weight, Tensor? scale=None, Tensor? least=None, Tensor? bias=None, "
      "int activation_bits=16, bool exact=False) -> Tensor");
  library.def("quantize_int8(Tensor weight) -> (Tensor, Tensor)");

  library.def("can_use_tiles() -> bool", [] { return can_use_tiles(); });
  library.def("can_multiply_many_rows(int group) -> bool", [](int64_t group) { return can_multiply_many_rows(group); });

  // training
  library.def("linear_tiles(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("linear_tiles_grad_input(Tensor grad, Tensor weight) -> Tensor");
  library.def("gelu_tanh(Tensor x) -> Tensor");
  library.def("gelu_tanh_backward(Tensor grad, Tensor x) -> Tensor");
  library.def("attend_causal(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)");
  library.def(
      "attend_causal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums, float scale) -> "
      "(Tensor, Tensor, Tensor)");

  // decoding
  library.def(
      "topk_continuations(Tensor logits, Tensor scores, Tensor suppressed, int rows_per_prompt, int count) -> "
      "(Tensor, Tensor)");

  library.class_<NativeStack>("NativeStack")
      .def(torch::init<int64_t, std::vector<FieldDict>, FieldDict>(), "", {arg("width"), arg("blocks"), arg("norm")})
      .def("run", &run_stack, "",
           {arg("x"), arg("lengths"), arg("counts"), arg("tables"), arg("keys"), arg("values"), arg("source_keys"),
            arg("source_values"), arg("source_tables"), arg("source_lengths"), arg("positions"), arg("rotary_cos"),
            arg("rotary_sin"), arg("position_biases"), arg("exact") = false, arg("causal") = true});
  library.def("copy_pages(Tensor[] pools, Tensor sources, Tensor targets, Tensor used) -> ()");
}

TORCH_LIBRARY_IMPL(monoblock, CPU, library) {
  library.impl("linear", &linear);
  library.impl("quantize_int8", &quantize_int8);
  library.impl("linear_tiles", &linear_tiles);
  library.impl("linear_tiles_grad_input", &linear_tiles_grad_input);
  library.impl("gelu_tanh", &gelu::forward);
  library.impl("gelu_tanh_backward", &gelu::backward);
  library.impl("attend_causal", &causal::attend_causal);
  library.impl("attend_causal_backward", &causal::attend_causal_backward);
  library.impl("copy_pages", &pages::copy_pages);
  library.impl("topk_continuations", &topk_continuations);
}
