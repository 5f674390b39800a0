// See attention.h.
#include "attention.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "error.h"

namespace fiw::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

const DLTensor* dl_or_null(const SharedTensor& tensor) { return python::dl_or_null(tensor.get()); }

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<fiw_attention_params>(module, "Params", "The values that shape an attention call.")
      .def(
          "__init__",
          [](fiw_attention_params* self, std::int32_t num_qo_heads, std::int32_t num_kv_heads, std::int32_t head_dim_qk,
             std::int32_t head_dim_vo, float sm_scale, bool causal, std::int32_t window_left, float logits_soft_cap) {
            *self = {sizeof(fiw_attention_params),
                     num_qo_heads,
                     num_kv_heads,
                     head_dim_qk,
                     head_dim_vo,
                     sm_scale,
                     causal ? 1 : 0,
                     window_left,
                     logits_soft_cap};
          },
          "num_qo_heads"_a, "num_kv_heads"_a, "head_dim_qk"_a, "head_dim_vo"_a, "sm_scale"_a, "causal"_a,
          "window_left"_a, "logits_soft_cap"_a);

  nb::class_<KvCache>(module, "KvCache", "A view of one layer's paged K and V; keeps its tensors alive.")
      .def(
          "__init__",
          [](KvCache* self, SharedTensor k, SharedTensor v, SharedTensor kv, SharedTensor k_head_scale,
             SharedTensor v_head_scale, float k_scale, float v_scale, bool hnd) {
            new (self) KvCache();
            self->c.k = dl_or_null(k);
            self->c.v = dl_or_null(v);
            self->c.kv = dl_or_null(kv);
            self->c.k_head_scale = dl_or_null(k_head_scale);
            self->c.v_head_scale = dl_or_null(v_head_scale);
            self->c.k_scale = k_scale;
            self->c.v_scale = v_scale;
            self->c.layout = hnd ? FIW_LAYOUT_HND : FIW_LAYOUT_NHD;
            self->tensors = {std::move(k), std::move(v), std::move(kv), std::move(k_head_scale),
                             std::move(v_head_scale)};
          },
          "k"_a.none(), "v"_a.none(), "kv"_a.none(), "k_head_scale"_a.none(), "v_head_scale"_a.none(), "k_scale"_a,
          "v_scale"_a, "hnd"_a);

  nb::class_<Extras>(module, "Extras", "Inputs that may differ from layer to layer; each may be None.")
      .def(
          "__init__",
          [](Extras* self, SharedTensor sinks, SharedTensor alibi_slopes, SharedTensor mask, SharedTensor mask_indptr) {
            new (self) Extras();
            self->c.sinks = dl_or_null(sinks);
            self->c.alibi_slopes = dl_or_null(alibi_slopes);
            self->c.mask = dl_or_null(mask);
            self->c.mask_indptr = dl_or_null(mask_indptr);
            self->tensors = {std::move(sinks), std::move(alibi_slopes), std::move(mask), std::move(mask_indptr)};
          },
          "sinks"_a.none(), "alibi_slopes"_a.none(), "mask"_a.none(), "mask_indptr"_a.none());

  module.def(
      "alibi_slopes",
      [](const Tensor& slopes) { call([&](fiw_error* error) { return fiw_alibi_slopes(slopes.dl(), error); }); },
      "slopes"_a);
  module.def(
      "packed_mask_bytes",
      [](const Tensor& qo_lens, const Tensor& kv_lens) {
        std::size_t bytes = 0;
        call([&](fiw_error* error) { return fiw_packed_mask_bytes(qo_lens.dl(), kv_lens.dl(), &bytes, error); });
        return bytes;
      },
      "qo_lens"_a, "kv_lens"_a);
  module.def(
      "pack_mask",
      [](const Tensor& booleans, const Tensor& qo_lens, const Tensor& kv_lens, const Tensor& mask,
         const Tensor& mask_indptr) {
        call_unlocked([&](fiw_error* error) {
          return fiw_pack_mask(booleans.dl(), qo_lens.dl(), kv_lens.dl(), mask.dl(), mask_indptr.dl(), error);
        });
      },
      "booleans"_a, "qo_lens"_a, "kv_lens"_a, "mask"_a, "mask_indptr"_a);
}

}  // namespace fiw::python
