// The few-row kernel, for every KV element type.
// clang-format off: Highway needs this order
#include "cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/stream.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// clang-format on

#include "cpu/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

UnitKernel choose_stream(DType kv_dtype) {
  return with_element(kv_dtype, [](auto element) -> UnitKernel { return &stream_item<decltype(element)>; });
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fiw::cpu {

HWY_EXPORT(choose_stream);

UnitKernel stream_kernel(DType kv_dtype) { return HWY_DYNAMIC_DISPATCH(choose_stream)(kv_dtype); }

}  // namespace fiw::cpu
#endif
