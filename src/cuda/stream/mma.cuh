// The instructions that stream.cuh is made of, each with the layout of its operands over the lanes of a warp.
//
// Lane l is (g, t) = (l / 4, l % 4). A product is D[16 x 8] += A[16 x 16] * B[16 x 8]; a register holds two 16-bit
// elements, the lower one first:
//   A: (row g, columns 2t, 2t + 1), (row g + 8, same), (row g, columns 2t + 8, 2t + 9), (row g + 8, same)
//   B: (rows 2t, 2t + 1 of column g), (rows 2t + 8, 2t + 9 of column g)
//   D: float32 (row g, columns 2t and 2t + 1), then (row g + 8, same)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/packed.cuh"

namespace fiw::cuda {

__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                                             __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                                             half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Four matrices of 8 rows of 16 bytes; lane l gives the address of row l % 8 of matrix l / 8. Of each, lane (g, t)
/// gets the bytes 4t .. 4t + 3 of row g.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
/// Transposed: of each, lane (g, t) gets the g-th pair of bytes of rows 2t and 2t + 1.
__device__ __forceinline__ void load_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
/// An 8 x 8 matrix of 16-bit elements across the warp: lane (g, t) gives (row g, columns 2t, 2t + 1) and gets
/// (rows 2t, 2t + 1 of column g).
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t x) {
  std::uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/// 16 bytes from global to shared memory, around the first-level cache; zeros where `live` is not set. The second-level
/// cache gives them up before all else: they are read once, while tables, queries and partial results come again.
__device__ __forceinline__ void copy_16(std::uint32_t to, const void* from, bool live) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
               :
               : "r"(to), "l"(from), "r"(live ? 16 : 0), "l"(policy)
               : "memory");
}
/// 16 and 4 bytes that the cache is to keep.
__device__ __forceinline__ void copy_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_4(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kGroups` groups of this thread's copies are under way.
template <int kGroups>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

/// Two fp8 values, in the lower 16 bits, as fp16: exact.
__device__ __forceinline__ std::uint32_t widen(std::uint32_t pair, __nv_fp8_e4m3) {
  const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return wide.x | static_cast<std::uint32_t>(wide.y) << 16;
}
__device__ __forceinline__ std::uint32_t widen(std::uint32_t pair, __nv_fp8_e5m2) {
  return __byte_perm(pair, 0, 0x1404);  // fp16 is e5m2 with more bits behind
}

}  // namespace fiw::cuda
