// Rows of new tokens into the element type of a KV cache: scaled, rounded to nearest even, saturated.
// clang-format off: Highway needs this order
#include "cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/append.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// clang-format on

#include "cpu/kernels.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

template <class From, class To>
void convert(const void* from, std::int32_t count, float scale, void* to) {
  const Narrow d;
  const auto divisor = hn::Set(d, scale);
  const auto* source = static_cast<const typename From::Raw*>(from);
  auto* target = static_cast<typename To::Raw*>(to);
  for (std::int32_t c = 0; c < count; c += static_cast<std::int32_t>(hn::MaxLanes(d))) {
    store<To, Overflow::kSaturate>(d, hn::Div(load<From>(d, source + c), divisor), target + c);
  }
}

ConvertKernel choose_convert(DType from, DType to) {
  return with_wide_element(from, [to](auto source) {
    return with_element(to, [](auto target) -> ConvertKernel { return &convert<decltype(source), decltype(target)>; });
  });
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fiw::cpu {

HWY_EXPORT(choose_convert);

ConvertKernel convert_kernel(DType from, DType to) { return HWY_DYNAMIC_DISPATCH(choose_convert)(from, to); }

}  // namespace fiw::cpu
#endif
