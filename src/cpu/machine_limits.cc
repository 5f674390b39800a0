// Two micro-benchmarks, compiled for every SIMD target: the best of a few passes.
// clang-format off: Highway needs this order
#include "cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/machine_limits.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// clang-format on

#include "cpu/machine_limits.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Sums `count` floats (a multiple of 128): 8 streams of loads, no chain that could limit them.
float read_floats(const float* from, std::int64_t count) {
  const hn::CappedTag<float, 16> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  hn::Vec<decltype(d)> sums[8];
  for (auto& sum : sums) sum = hn::Zero(d);
  for (std::int64_t i = 0; i < count; i += 8 * kLanes) {
    __builtin_prefetch(from + i + 1024, 0, 3);
    __builtin_prefetch(from + i + 1040, 0, 3);
    __builtin_prefetch(from + i + 1056, 0, 3);
    __builtin_prefetch(from + i + 1072, 0, 3);
    HWY_UNROLL(8)
    for (int s = 0; s < 8; ++s) sums[s] = hn::Add(sums[s], hn::Load(d, from + i + s * kLanes));
  }
  auto total = sums[0];
  for (int s = 1; s < 8; ++s) total = hn::Add(total, sums[s]);
  return hn::GetLane(hn::SumOfLanes(d, total));
}

/// `rounds` multiply-adds on each of 12 vectors; returns the operations done through `operations`.
float multiply_add(std::int64_t rounds, std::int64_t& operations) {
  const hn::CappedTag<float, 16> d;
  const auto factor = hn::Set(d, 0.999F);
  const auto addend = hn::Set(d, 0.001F);
  hn::Vec<decltype(d)> sums[12];
  for (int s = 0; s < 12; ++s) sums[s] = hn::Set(d, static_cast<float>(s));
  for (std::int64_t i = 0; i < rounds; ++i) {
    HWY_UNROLL(12)
    for (auto& sum : sums) sum = hn::MulAdd(sum, factor, addend);
  }
  auto total = sums[0];
  for (int s = 1; s < 12; ++s) total = hn::Add(total, sums[s]);
  operations = rounds * 12 * 2 * static_cast<std::int64_t>(hn::MaxLanes(d));
  return hn::GetLane(hn::SumOfLanes(d, total));
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>

namespace fiw {
namespace cpu {

HWY_EXPORT(read_floats);
HWY_EXPORT(multiply_add);

// With one target, the macro takes no qualified name.
namespace {

float best_read_floats(const float* from, std::int64_t count) { return HWY_DYNAMIC_DISPATCH(read_floats)(from, count); }

float best_multiply_add(std::int64_t steps, std::int64_t& operations) {
  return HWY_DYNAMIC_DISPATCH(multiply_add)(steps, operations);
}

}  // namespace
}  // namespace cpu

namespace {

constexpr std::int64_t kFloats = std::int64_t{64} << 20;

// Units a second of `work(thread)` on all threads.
template <class Work>
double rate(std::int32_t threads, const Work& work) {
  std::atomic<float> sink{0.0F};  // the results have to go somewhere
  double units = 0.0;
  const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : units)
  for (std::int32_t thread = 0; thread < threads; ++thread) {
    float result = 0.0F;
    units += work(thread, result);
    sink.store(result, std::memory_order_relaxed);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return units / elapsed.count();
}

}  // namespace

LimitMeter::LimitMeter(std::int32_t threads) : threads_(threads) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  memory_.reset(static_cast<float*>(std::aligned_alloc(kHugePage, kFloats * sizeof(float))));
  if (memory_ == nullptr) throw std::bad_alloc();
  madvise(memory_.get(), kFloats * sizeof(float), MADV_HUGEPAGE);
  std::fill_n(memory_.get(), kFloats, 1.0F);
}

void LimitMeter::Free::operator()(float* memory) const noexcept { std::free(memory); }

double LimitMeter::read_bandwidth() {
  const std::int64_t share = kFloats / threads_ / 128 * 128;
  return rate(threads_, [&](std::int32_t thread, float& result) {
    result = cpu::best_read_floats(memory_.get() + thread * share, share);
    return static_cast<double>(share) * sizeof(float);
  });
}

double LimitMeter::fma_peak() {
  return rate(threads_, [](std::int32_t, float& result) {
    std::int64_t operations = 0;
    result = cpu::best_multiply_add(std::int64_t{1} << 20, operations);
    return static_cast<double>(operations);
  });
}

}  // namespace fiw
#endif
