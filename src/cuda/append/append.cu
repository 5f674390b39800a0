// One block a token; K and V in one launch, told apart by the grid's second axis.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/append/append.h"
#include "cuda/launch.cuh"

namespace fiw::cuda {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ __forceinline__ float load(const half* p) {
  const float x = __half2float(*p);
  return isnan(x) ? __int_as_float(0x7FC00000) : x;
}

// Nearest even; fp16 and fp8 saturate. NaN stays NaN, with the bits that the CPU backend gives it.
__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(__nv_bfloat16* p, float x) {
  *p = isnan(x) ? __ushort_as_bfloat16(static_cast<unsigned short>((__float_as_uint(x) >> 16) | 0x40U))
                : __float2bfloat16_rn(x);
}
__device__ __forceinline__ void store(half* p, float x) {
  *p = isnan(x) ? __ushort_as_half(0x7E00) : __float2half_rn(fminf(fmaxf(x, -65504.0F), 65504.0F));
}
__device__ __forceinline__ void store(__nv_fp8_e4m3* p, float x) {
  p->__x = isnan(x) ? 0x7F : __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ void store(__nv_fp8_e5m2* p, float x) {
  p->__x = isnan(x) ? 0x7F : __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
}

struct Side {
  const void* from;
  void* to;
  std::int64_t from_row, from_head;
  std::int64_t page, token, head;
  std::int32_t dim;
  float scale;
  const float* head_scale;
};

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const Side k, const Side v, const AppendTable table, std::int32_t heads, std::int32_t page_size) {
  const Side& side = blockIdx.y == 0 ? k : v;
  const auto row = static_cast<std::int32_t>(blockIdx.x);
  // The request whose rows hold `row`: the last one that starts at or before it.
  std::int32_t low = 0;
  for (std::int32_t high = table.batch; high - low > 1;) {
    const std::int32_t middle = low + (high - low) / 2;
    (table.append_indptr[middle] <= row ? low : high) = middle;
  }
  const std::int32_t position = table.kv_lens[low] - (table.append_indptr[low + 1] - row);
  if (position < 0) return;
  const std::int64_t page = table.indices[table.indptr[low] + position / page_size];
  const From* const from = static_cast<const From*>(side.from) + row * side.from_row;
  To* const to = static_cast<To*>(side.to) + page * side.page + position % page_size * side.token;
  for (std::int32_t i = threadIdx.x; i < heads * side.dim; i += kThreads) {
    const std::int32_t head = i / side.dim;
    const std::int32_t d = i - head * side.dim;
    const float scale = side.head_scale == nullptr ? side.scale : side.scale * side.head_scale[head];
    const float value = load(from + head * side.from_head + d);
    store(to + head * side.head + d, isnan(value) ? value : value / scale);
  }
}

Side side_of(const ConstTensor& from, void* to, const KvCache::Strides& stride, float scale, const float* head_scale) {
  return {.from = from.data,
          .to = to,
          .from_row = from.row_stride,
          .from_head = from.head_stride,
          .page = stride.page,
          .token = stride.token,
          .head = stride.head,
          .dim = static_cast<std::int32_t>(from.dim),
          .scale = scale,
          .head_scale = head_scale};
}

template <class From, class To>
cudaError_t launch(const ConstTensor& k, const ConstTensor& v, const KvCache& kv, const AppendTable& table,
                   cudaStream_t stream) {
  return launch_kernel(&append_kernel<From, To>, dim3(static_cast<unsigned>(k.rows), 2), kThreads, stream,
                       side_of(k, kv.k, kv.k_stride, kv.k_scale, kv.k_head_scale),
                       side_of(v, kv.v, kv.v_stride, kv.v_scale, kv.v_head_scale), table, kv.num_kv_heads,
                       kv.page_size);
}

template <class From>
cudaError_t launch(const ConstTensor& k, const ConstTensor& v, const KvCache& kv, const AppendTable& table,
                   cudaStream_t stream) {
  switch (kv.dtype) {
    case DType::kFloat32:
      return launch<From, float>(k, v, kv, table, stream);
    case DType::kFloat16:
      return launch<From, half>(k, v, kv, table, stream);
    case DType::kBFloat16:
      return launch<From, __nv_bfloat16>(k, v, kv, table, stream);
    case DType::kFloat8E4M3:
      return launch<From, __nv_fp8_e4m3>(k, v, kv, table, stream);
    case DType::kFloat8E5M2:
      return launch<From, __nv_fp8_e5m2>(k, v, kv, table, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t append_kv(const ConstTensor& k, const ConstTensor& v, const KvCache& kv, const AppendTable& table,
                      cudaStream_t stream) {
  switch (k.dtype) {
    case DType::kFloat32:
      return launch<float>(k, v, kv, table, stream);
    case DType::kFloat16:
      return launch<half>(k, v, kv, table, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(k, v, kv, table, stream);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace fiw::cuda
