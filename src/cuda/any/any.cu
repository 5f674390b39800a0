// One warp takes one packed (token, head) row: a lane scores one key, then the lanes share out the value's elements.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/any/any.h"
#include "cuda/launch.cuh"

namespace fiw::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxDim = 576;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr float kLog2E = 1.44269504088896340736F;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) { return static_cast<float>(x); }
__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store(half* p, float x) { *p = __float2half_rn(x); }

__device__ __forceinline__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

/// The keys that one item covers, reckoned as the tile kernels do.
struct Span {
  std::int64_t qo_len, kv_len;
  std::int64_t begin, end;
  std::int64_t chunks;

  __device__ Span(const AnyArgs& args, std::int32_t request, std::int32_t tile, std::int32_t chunk,
                  std::int32_t group) {
    const AttentionArgs& call = args.call;
    const KvView& kv = call.kv;
    qo_len = call.qo_indptr[request + 1] - call.qo_indptr[request];
    const std::int32_t owned = kv.indptr[request + 1] - kv.indptr[request];
    kv_len = kv.last_page_len == nullptr ? owned
             : owned == 0                ? 0
                                         : std::int64_t{owned - 1} * kv.page_size + kv.last_page_len[request];
    const std::int64_t window = call.skip_window >= 0 ? call.skip_window : kv_len;
    const std::int64_t first_token = std::int64_t{tile} * args.tile_rows / group;
    const std::int64_t start = max(kv_len + first_token - qo_len - window, std::int64_t{0});
    const std::int64_t chunk_size = *call.kv_chunk_size;
    begin = call.split_kv ? min(chunk * chunk_size + start, kv_len) : min(start, kv_len);
    end = call.split_kv ? min((chunk + 1) * chunk_size + start, kv_len) : kv_len;
    chunks = call.split_kv && qo_len > 0 ? (call.o_indptr[request + 1] - call.o_indptr[request]) / qo_len : 1;
  }
};

__device__ __forceinline__ bool visible(const AttentionArgs& call, const Span& span, std::int32_t request,
                                        std::int64_t token, std::int64_t key) {
  const std::int64_t position = span.kv_len - span.qo_len + token;
  bool seen = key < span.end;
  if (call.causal) seen &= key <= position;
  if (call.window_left >= 0) seen &= key >= position - call.window_left;
  if (seen && call.mask != nullptr) {
    const std::int64_t bit = token * span.kv_len + key;
    seen = (call.mask[call.mask_indptr[request] + bit / 8] >> (bit % 8)) & 1;
  }
  return seen;
}

template <class Q, class Kv>
__global__ void __launch_bounds__(kWarps * 32) any_kernel(const __grid_constant__ AnyArgs args) {
  const AttentionArgs& call = args.call;
  if (call.block_valid != nullptr && call.block_valid[blockIdx.x] == 0) return;
  const std::int32_t request = call.request_indices[blockIdx.x];
  const std::int32_t tile = call.qo_tile_indices[blockIdx.x];
  const std::int32_t chunk = call.kv_tile_indices[blockIdx.x];
  const auto kv_head = static_cast<std::int32_t>(blockIdx.z);
  const std::int32_t group = call.num_qo_heads / call.kv.num_kv_heads;
  const Span span(args, request, tile, chunk, group);

  __shared__ float queries[kWarps][kMaxDim];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const query = queries[warp];
  const Kv* const keys = static_cast<const Kv*>(call.kv.k) + kv_head * call.kv.k_head;
  const Kv* const values = static_cast<const Kv*>(call.kv.v) + kv_head * call.kv.v_head;
  const float k_head_scale = call.k_head_scale == nullptr ? 1.0F : call.k_head_scale[kv_head];
  const float v_scale = call.v_head_scale == nullptr ? call.v_scale : call.v_scale * call.v_head_scale[kv_head];

  const std::int64_t first = std::int64_t{tile} * args.tile_rows;
  const std::int64_t last = min(first + args.tile_rows, span.qo_len * group);
  for (std::int64_t row = first + warp; row < last; row += kWarps) {
    const std::int64_t token = row / group;
    const auto head = static_cast<std::int32_t>(kv_head * group + row % group);
    const Q* const from =
        static_cast<const Q*>(call.q) + (call.qo_indptr[request] + token) * call.q_row + head * call.q_head;
    __syncwarp();
    for (int d = lane; d < args.head_dim_qk; d += 32) query[d] = to_float(from[d]);
    __syncwarp();

    float top = -INFINITY;
    float sum = 0;
    float total[kMaxDim / 32] = {};
    for (std::int64_t base = span.begin; base < span.end; base += 32) {
      const std::int64_t key = base + lane;
      const bool seen = visible(call, span, request, token, key);
      const unsigned seen_keys = __ballot_sync(kAllLanes, seen);
      if (seen_keys == 0) continue;
      float score = -INFINITY;
      std::int64_t value_at = 0;
      if (seen) {
        std::int64_t key_at = 0;
        if (call.kv.indices == nullptr) {
          const std::int64_t at = call.kv.indptr[request] + key;
          key_at = at * call.kv.k_token;
          value_at = at * call.kv.v_token;
        } else {
          const std::int64_t page = call.kv.indices[call.kv.indptr[request] + key / call.kv.page_size];
          const std::int64_t slot = key % call.kv.page_size;
          key_at = page * call.kv.k_page + slot * call.kv.k_token;
          value_at = page * call.kv.v_page + slot * call.kv.v_token;
        }
        float dot = 0;
        for (int d = 0; d < args.head_dim_qk; ++d) dot += query[d] * to_float(keys[key_at + d]);
        score = dot * (call.sm_scale * k_head_scale);
        if (call.alibi_slopes != nullptr) {
          score += call.alibi_slopes[head] * static_cast<float>(key - (span.kv_len - span.qo_len + token));
        }
        if (call.soft_cap > 0) score = call.soft_cap * tanhf(score / call.soft_cap);
      }
      const float new_top = fmaxf(top, warp_max(score));
      const float shrink = expf(top - new_top);
      const float weight = seen ? expf(score - new_top) : 0.0F;
      top = new_top;
      sum = sum * shrink + warp_sum(weight);
      for (float& element : total) element *= shrink;
      for (int t = 0; t < 32; ++t) {
        const float p = __shfl_sync(kAllLanes, weight, t);
        const std::int64_t at = __shfl_sync(kAllLanes, value_at, t);
        if ((seen_keys >> t & 1U) == 0) continue;
#pragma unroll
        for (int i = 0; i < kMaxDim / 32; ++i) {
          const int d = lane + 32 * i;
          if (d < args.head_dim_vo) total[i] += p * to_float(values[at + d]);
        }
      }
    }

    const bool empty = top == -INFINITY && !isnan(sum);  // fmaxf passes over NaN, the sum does not
    float norm = 0;
    float log_sum = -INFINITY;
    if (!empty) {
      float shrink = 1.0F;
      if (!call.split_kv && call.sinks != nullptr) {
        const float sink = call.sinks[head];
        const float new_top = fmaxf(top, sink);
        shrink = expf(top - new_top);
        sum = sum * shrink + expf(sink - new_top);
        top = new_top;
      }
      norm = shrink / sum * v_scale;
      log_sum = call.split_kv ? (top + logf(sum)) * kLog2E : top + logf(sum);
    }
    const std::int64_t out_row = call.o_indptr[request] + token * span.chunks + (call.split_kv ? chunk : 0);
    Q* const to = static_cast<Q*>(call.out) + out_row * args.out_row + head * args.out_head;
#pragma unroll
    for (int i = 0; i < kMaxDim / 32; ++i) {
      const int d = lane + 32 * i;
      if (d < args.head_dim_vo) store(to + d, total[i] * norm);
    }
    if (call.lse != nullptr && lane == 0) call.lse[out_row * call.num_qo_heads + head] = log_sum;
  }
}

template <class Q, class Kv>
cudaError_t launch(const AnyArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.call.items), 1, static_cast<unsigned>(args.call.kv.num_kv_heads));
  return launch_kernel(&any_kernel<Q, Kv>, grid, kWarps * 32, stream, args);
}

template <class Q>
cudaError_t launch(const AnyArgs& args, cudaStream_t stream) {
  switch (args.kv) {
    case DType::kFloat32:
      return launch<Q, float>(args, stream);
    case DType::kFloat16:
      return launch<Q, half>(args, stream);
    case DType::kBFloat16:
      return launch<Q, __nv_bfloat16>(args, stream);
    case DType::kFloat8E4M3:
      return launch<Q, __nv_fp8_e4m3>(args, stream);
    case DType::kFloat8E5M2:
      return launch<Q, __nv_fp8_e5m2>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t attend_any(const AnyArgs& args, cudaStream_t stream) {
  switch (args.q) {
    case DType::kFloat32:
      return launch<float>(args, stream);
    case DType::kFloat16:
      return launch<half>(args, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(args, stream);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace fiw::cuda
