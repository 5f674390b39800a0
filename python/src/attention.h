// What attention calls take besides tensors, for Python: K/V caches, parameters and optional inputs.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>

#include "fiw/fiw.h"
#include "tensor.h"

namespace fiw::python {

using SharedTensor = std::shared_ptr<const Tensor>;

/// A fiw_kv_cache that keeps its tensors.
struct KvCache {
  std::array<SharedTensor, 5> tensors;
  fiw_kv_cache c = FIW_KV_CACHE_INIT;
};

/// A fiw_attention_extras that keeps its tensors.
struct Extras {
  std::array<SharedTensor, 4> tensors;
  fiw_attention_extras c = FIW_ATTENTION_EXTRAS_INIT;
};

inline const fiw_attention_extras* c_or_null(const Extras* extras) noexcept {
  return extras == nullptr ? nullptr : &extras->c;
}

void bind_attention(nanobind::module_& module);

}  // namespace fiw::python
