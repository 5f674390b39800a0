// One warp copies one token's heads, eight elements a lane at a time where the cache is aligned, else one.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/gather/gather.h"
#include "cuda/launch.cuh"

namespace fiw::cuda {
namespace {

constexpr int kWarps = 4;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

template <class To, class From, int kCount>
__device__ __forceinline__ Vector<To, kCount> widen(const Vector<From, kCount>& from) {
  if constexpr (std::is_same_v<To, From>) {
    return from;
  } else {
    Vector<To, kCount> to;
#pragma unroll
    for (int i = 0; i < kCount; ++i) to.values[i] = To(static_cast<float>(from.values[i]));
    return to;
  }
}

struct Side {
  const void* from;
  void* to;
  std::int64_t page, token, head;
  std::int32_t dim;
};

template <class From, class To, int kVector>
__global__ void __launch_bounds__(kWarps * 32)
    gather_kernel(const Side k, const Side v, const GatherTable table, std::int64_t total_kv, std::int32_t heads,
                  std::int32_t page_size) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= total_kv) return;
  const Side& side = blockIdx.y == 0 ? k : v;
  // The request whose tokens hold `row`: the last one that starts at or before it.
  std::int32_t low = 0;
  for (std::int32_t high = table.batch; high - low > 1;) {
    const std::int32_t middle = low + (high - low) / 2;
    (table.kv_offsets[middle] <= row ? low : high) = middle;
  }
  const auto position = static_cast<std::int32_t>(row - table.kv_offsets[low]);
  const std::int64_t page = table.indices[table.indptr[low] + position / page_size];
  const From* const from = static_cast<const From*>(side.from) + page * side.page + position % page_size * side.token;
  To* const to = static_cast<To*>(side.to) + row * heads * side.dim;
  const std::int32_t per_head = side.dim / kVector;
  for (std::int32_t i = threadIdx.x % 32; i < heads * per_head; i += 32) {
    const std::int32_t head = i / per_head;
    const std::int32_t d = (i - head * per_head) * kVector;
    const auto vector = *reinterpret_cast<const Vector<From, kVector>*>(from + head * side.head + d);
    *reinterpret_cast<Vector<To, kVector>*>(to + head * side.dim + d) = widen<To>(vector);
  }
}

template <class From, class To>
cudaError_t launch(const KvCache& kv, const GatherTable& table, std::int64_t total_kv, void* k, void* v,
                   cudaStream_t stream) {
  const Side k_side{kv.k, k, kv.k_stride.page, kv.k_stride.token, kv.k_stride.head, kv.head_dim_qk};
  const Side v_side{kv.v, v, kv.v_stride.page, kv.v_stride.token, kv.v_stride.head, kv.head_dim_vo};
  const dim3 grid(static_cast<unsigned>((total_kv + kWarps - 1) / kWarps), 2);
  const auto aligned = [](const Side& side) {
    constexpr std::uintptr_t kBytes = sizeof(Vector<From, 8>);
    const auto whole = [](std::int64_t stride) { return stride * sizeof(From) % kBytes == 0; };
    return reinterpret_cast<std::uintptr_t>(side.from) % kBytes == 0 && whole(side.page) && whole(side.token) &&
           whole(side.head);
  };
  const auto kernel = aligned(k_side) && aligned(v_side) ? &gather_kernel<From, To, 8> : &gather_kernel<From, To, 1>;
  return launch_kernel(kernel, grid, kWarps * 32, stream, k_side, v_side, table, total_kv, kv.num_kv_heads,
                       kv.page_size);
}

template <class To>
cudaError_t launch_from(const KvCache& kv, const GatherTable& table, std::int64_t total_kv, void* k, void* v,
                        cudaStream_t stream) {
  switch (kv.dtype) {
    case DType::kFloat8E4M3:
      return launch<__nv_fp8_e4m3, To>(kv, table, total_kv, k, v, stream);
    case DType::kFloat8E5M2:
      return launch<__nv_fp8_e5m2, To>(kv, table, total_kv, k, v, stream);
    default:
      return launch<To, To>(kv, table, total_kv, k, v, stream);
  }
}

}  // namespace

cudaError_t gather_kv(const KvCache& kv, const GatherTable& table, std::int64_t total_kv, DType dtype, void* k, void* v,
                      cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat16:
      return launch_from<half>(kv, table, total_kv, k, v, stream);
    case DType::kBFloat16:
      return launch_from<__nv_bfloat16>(kv, table, total_kv, k, v, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fiw::cuda
