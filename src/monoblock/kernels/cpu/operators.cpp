// Every operator and class that Python sees, with the names of its arguments.  This is the one file that is compiled:
// it includes all others, and its order is that in which classes must be known to those that take them as arguments.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "attention/attend_one_query.h"
#include "search/beam_search_batch.h"
#include "attention/causal_attention.h"
#include "stack/encoder.h"
#include "stack/gelu.h"
#include "linear/linear.h"
#include "linear/quantize.h"
#include "stack/pass_operator.h"
#include "stack/stack_operator.h"
#include "search/topk_continuations.h"

TORCH_LIBRARY_FRAGMENT(monoblock, library) {
  using panels::BeamSearchBatch, torch::arg;

  // quantization
  library.def("linear_dense(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int activation_bits=16) -> Tensor");
  library.def(
      "linear_int4(Tensor x, Tensor weight, Tensor scale, Tensor least, Tensor? bias, int activation_bits=16) -> Tensor");
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
  library.def("attend_one_query(Tensor q, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor");
  library.def(
      "topk_continuations(Tensor logits, Tensor scores, Tensor suppressed, int rows_per_prompt, int count) -> "
      "(Tensor, Tensor)");

  library.class_<NativeStack>("NativeStack")
      .def(torch::init<int64_t, std::vector<FieldDict>, FieldDict>(), "", {arg("width"), arg("blocks"), arg("norm")})
      .def("supports_batches", &NativeStack::supports_batches)
      .def("supports_prompts", &NativeStack::supports_prompts)
      .def("step", &step_stack, "",
           {arg("x"), arg("positions"), arg("lengths"), arg("active"), arg("written"), arg("keys"), arg("values"),
            arg("source_keys"), arg("source_values"), arg("source_mask"), arg("cache_positions"), arg("cache_index"),
            arg("windows"), arg("rotary_cos"), arg("rotary_sin"), arg("position_biases")})
      .def("run", &run_stack, "",
           {arg("x"), arg("lengths"), arg("counts"), arg("tables"), arg("keys"), arg("values"), arg("source_keys"),
            arg("source_values"), arg("source_tables"), arg("source_lengths"), arg("positions"), arg("rotary_cos"),
            arg("rotary_sin"), arg("position_biases"), arg("exact") = false});
  library.def("encode", &panels::encode);
  library.def("copy_pages(Tensor[] pools, Tensor sources, Tensor targets, Tensor used) -> ()");

  library.class_<SearchModel>("SearchModel")
      .def(torch::init<c10::intrusive_ptr<NativeStack>, at::Tensor, OptionalTensor, OptionalTensor, OptionalTensor, double,
                       OptionalTensor, double, int64_t>(),
           "",
           {arg("stack"), arg("output_table"), arg("table_scale"), arg("table_least"), arg("output_bias"),
            arg("output_scale"), arg("token_table"), arg("token_scale"), arg("activation_bits") = 16})
      .def("cache_memory", &SearchModel::cache_memory);

  library.class_<BeamSearchBatch>("BeamSearchBatch")
      .def(
          torch::init<c10::intrusive_ptr<SearchModel>, Tensors, Tensors, Tensors, Tensors, OptionalTensor,
                      const at::Tensor&, OptionalTensor, int64_t, int64_t, std::string, std::vector<int64_t>, double,
                      double>(),
          "",
          {arg("model"), arg("keys"), arg("values"), arg("source_keys"), arg("source_values"), arg("source_mask"),
           arg("lengths"), arg("position_table"), arg("beams"), arg("max_new_tokens"), arg("early_stopping"),
           arg("eos_tokens"), arg("length_penalty"), arg("length_offset") = 0.0})
      .def("add", &BeamSearchBatch::add, "",
           {arg("first_token"), arg("scores"), arg("running"), arg("finished_scores"), arg("finished"), arg("done")})
      .def("step", &BeamSearchBatch::step, "", {arg("x"), arg("suppressed")})
      .def("next_inputs", &BeamSearchBatch::next_inputs)
      .def("hypotheses", &BeamSearchBatch::hypotheses, "", {arg("prompt")})
      .def("lengths", &BeamSearchBatch::lengths)
      .def("cache_rows", &BeamSearchBatch::cache_rows);
}

TORCH_LIBRARY_IMPL(monoblock, CPU, library) {
  library.impl("linear_dense", &linear_dense);
  library.impl("linear_int8", &linear_int8);
  library.impl("linear_int4", &linear_int4);
  library.impl("quantize_int8", &quantize_int8);
  library.impl("linear_tiles", &linear_tiles);
  library.impl("linear_tiles_grad_input", &linear_tiles_grad_input);
  library.impl("gelu_tanh", &gelu::forward);
  library.impl("gelu_tanh_backward", &gelu::backward);
  library.impl("attend_causal", &causal::attend_causal);
  library.impl("attend_causal_backward", &causal::attend_causal_backward);
  library.impl("attend_one_query", &attend_one_query);
  library.impl("copy_pages", &pages::copy_pages);
  library.impl("topk_continuations", &topk_continuations);
}
