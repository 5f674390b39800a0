// One block combines one (row, head), its warps sharing out the states. The largest logarithm is taken out first, so no
// exponential overflows; a state without keys is not even read.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/ahead.cuh"
#include "cuda/merge/merge.h"

namespace fiw::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kPerPass = 128;  ///< values a warp accumulates at once
constexpr float kLog2E = 1.44269504088896340736F;
constexpr float kLn2 = 0.693147180559945309417F;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store(half* p, float x) { *p = __float2half_rn(x); }

struct PartialSource {
  PartialRows rows;
  std::int32_t heads;
  std::int32_t dim;

  __device__ std::int64_t at(std::int64_t row, std::int32_t i) const {
    return rows.merge_indptr == nullptr ? row : rows.merge_indptr[row] + std::int64_t{i};
  }
  __device__ std::int32_t count(std::int64_t row) const {
    return rows.merge_indptr == nullptr ? 1 : rows.merge_indptr[row + 1] - rows.merge_indptr[row];
  }
  __device__ float log2_sum(std::int64_t row, std::int32_t head, std::int32_t i) const {
    return rows.lse[at(row, i) * heads + head];
  }
  template <class T>
  __device__ const T* values(std::int64_t row, std::int32_t head, std::int32_t i) const {
    return static_cast<const T*>(rows.out) + (at(row, i) * heads + head) * dim;
  }
  __device__ float scale(std::int32_t head) const {
    return rows.v_head_scale == nullptr ? rows.v_scale : rows.v_scale * rows.v_head_scale[head / rows.group];
  }
  __device__ float sink(std::int32_t head) const {
    return rows.sinks == nullptr ? -INFINITY : rows.sinks[head] * kLog2E;
  }
};

struct StateSource {
  const MergePart* device_parts;
  std::int32_t parts;
  std::int32_t heads;
  MergePart inline_parts[kInlineParts];

  __device__ const MergePart& part(std::int32_t i) const {
    return device_parts != nullptr ? device_parts[i] : inline_parts[i];
  }
  __device__ std::int32_t count(std::int64_t) const { return parts; }
  __device__ float log2_sum(std::int64_t row, std::int32_t head, std::int32_t i) const {
    return part(i).lse[row * heads + head] * kLog2E;
  }
  template <class T>
  __device__ const T* values(std::int64_t row, std::int32_t head, std::int32_t i) const {
    const MergePart& p = part(i);
    return static_cast<const T*>(p.out) + row * p.row_stride + head * p.head_stride;
  }
  __device__ float scale(std::int32_t) const { return 1.0F; }
  __device__ float sink(std::int32_t) const { return -INFINITY; }
};

__device__ __forceinline__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, offset));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, offset);
  return x;
}

template <class T, class Source>
__global__ void __launch_bounds__(kWarps * 32)
    merge_kernel(const __grid_constant__ Source source, T* out, std::int64_t row_stride, std::int64_t head_stride,
                 float* lse, std::int32_t heads, std::int32_t dim) {
  await_previous_kernel();
  const std::int64_t index = blockIdx.x;
  const std::int64_t row = index / heads;
  const auto head = static_cast<std::int32_t>(index - row * heads);
  const std::int32_t warp = threadIdx.x / 32;
  const std::int32_t lane = threadIdx.x % 32;
  const std::int32_t count = source.count(row);
  T* const target = out + row * row_stride + head * head_stride;

  // Every warp reckons the weights' norm for itself: it costs less than telling the others.
  float top = -INFINITY;
  bool any_nan = false;  // which fmaxf passes over
  for (std::int32_t i = lane; i < count; i += 32) {
    const float log2_sum = source.log2_sum(row, head, i);
    any_nan |= isnan(log2_sum);
    top = fmaxf(top, log2_sum);
  }
  top = warp_max(top);
  any_nan = __any_sync(0xFFFFFFFFU, any_nan);
  if (top == -INFINITY && !any_nan) {
    for (std::int32_t d = threadIdx.x; d < dim; d += kWarps * 32) store(target + d, 0.0F);
    if (lse != nullptr && threadIdx.x == 0) lse[index] = -INFINITY;
    return;
  }
  const float sink = source.sink(head);
  top = fmaxf(top, sink);
  float sum = 0;
  for (std::int32_t i = lane; i < count; i += 32) sum += exp2f(source.log2_sum(row, head, i) - top);
  sum = warp_sum(sum) + exp2f(sink - top);
  const float norm = source.scale(head) / sum;

  __shared__ float shares[kWarps][kPerPass];
  for (std::int32_t base = 0; base < dim; base += kPerPass) {
    float total[kPerPass / 32] = {};
#pragma unroll 4
    for (std::int32_t i = warp; i < count; i += kWarps) {
      const float weight = exp2f(source.log2_sum(row, head, i) - top) * norm;
      if (weight == 0.0F) continue;
      const T* const from = source.template values<T>(row, head, i) + base;
      for (int j = 0; j < kPerPass / 32; ++j) {
        const std::int32_t d = lane + 32 * j;
        if (base + d < dim) total[j] += weight * to_float(from[d]);
      }
    }
    for (int j = 0; j < kPerPass / 32; ++j) shares[warp][lane + 32 * j] = total[j];
    __syncthreads();
    const std::int32_t d = threadIdx.x;
    if (base + d < dim) {
      float value = 0;
      for (int w = 0; w < kWarps; ++w) value += shares[w][d];
      store(target + base + d, value);
    }
    __syncthreads();
  }
  // `lse` may be one of the states' own: every warp has read them by now.
  if (lse != nullptr && threadIdx.x == 0) lse[index] = (top + log2f(sum)) * kLn2;
}

template <class T, class Source>
cudaError_t launch(const Source& source, const Tensor& out, float* lse, cudaStream_t stream) {
  static_assert(kPerPass == kWarps * 32, "a thread stores one value a pass");
  return launch_ahead(&merge_kernel<T, Source>, static_cast<unsigned>(out.rows * out.heads), kWarps * 32, 0, stream,
                      source, static_cast<T*>(out.data), out.row_stride, out.head_stride, lse,
                      static_cast<std::int32_t>(out.heads), static_cast<std::int32_t>(out.dim));
}

template <class Source>
cudaError_t launch(const Source& source, const Tensor& out, float* lse, cudaStream_t stream) {
  switch (out.dtype) {
    case DType::kFloat32:
      return launch<float>(source, out, lse, stream);
    case DType::kFloat16:
      return launch<half>(source, out, lse, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(source, out, lse, stream);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t load_merge_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(&merge_kernel<float, PartialSource>),
                             reinterpret_cast<const void*>(&merge_kernel<half, PartialSource>),
                             reinterpret_cast<const void*>(&merge_kernel<__nv_bfloat16, PartialSource>)}) {
    if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t merge_partials(const PartialRows& partials, const Tensor& out, float* lse, cudaStream_t stream) {
  return launch(
      PartialSource{
          .rows = partials, .heads = static_cast<std::int32_t>(out.heads), .dim = static_cast<std::int32_t>(out.dim)},
      out, lse, stream);
}

cudaError_t merge_states(std::span<const MergePart> parts, const MergePart* device_parts, const Tensor& out, float* lse,
                         cudaStream_t stream) {
  StateSource source{.device_parts = device_parts,
                     .parts = static_cast<std::int32_t>(parts.size()),
                     .heads = static_cast<std::int32_t>(out.heads),
                     .inline_parts = {}};
  if (parts.size() <= kInlineParts) {
    source.device_parts = nullptr;
    std::ranges::copy(parts, source.inline_parts);
  }
  return launch(source, out, lse, stream);
}

}  // namespace fiw::cuda
