// Counter-based random data: the same seed gives the same tensors everywhere.
#include "random_fill.h"

#include <numeric>

#include "core/numeric.h"
#include "mix.h"

namespace fiw::cli {
namespace {

/// The sum of four 4-bit numbers, centred: deviation 9.2 / 8.
float bell(std::uint64_t bits) noexcept {
  const auto sum = (bits & 15U) + (bits >> 4 & 15U) + (bits >> 8 & 15U) + (bits >> 12 & 15U);
  return (static_cast<float>(sum) - 30.0F) * 0.125F;
}

void fill(void* data, DType dtype, std::int64_t offset, std::int64_t count, std::uint64_t seed) {
  for (std::int64_t i = 0; i < count; i += 4) {
    std::uint64_t word = mix(seed + static_cast<std::uint64_t>(offset + i));
    for (std::int64_t j = i; j < count && j < i + 4; ++j, word >>= 16) store_float(data, dtype, offset + j, bell(word));
  }
}

}  // namespace

void fill_random(const Tensor& tensor, std::uint64_t seed) {
  const std::uint64_t start = mix(seed);
  for (std::int64_t row = 0; row < tensor.rows; ++row) {
    for (std::int64_t head = 0; head < tensor.heads; ++head) {
      fill(tensor.data, tensor.dtype, row * tensor.row_stride + head * tensor.head_stride, tensor.dim, start);
    }
  }
}

void fill_random(void* data, DType dtype, std::int64_t count, std::uint64_t seed) {
  fill(data, dtype, 0, count, mix(seed));
}

PageTable scattered_table(std::int32_t page_size, std::int64_t num_pages, std::span<const std::int32_t> kv_lens,
                          std::uint64_t seed) {
  std::vector<std::int32_t> pool(static_cast<std::size_t>(num_pages));
  std::iota(pool.begin(), pool.end(), 0);
  for (std::size_t i = pool.size(); i > 1; --i) std::swap(pool[i - 1], pool[mix(seed, i) % i]);
  std::vector<std::vector<std::int32_t>> pages;
  auto next = pool.begin();
  for (const std::int32_t len : kv_lens) {
    const auto end = next + (len + page_size - 1) / page_size;
    pages.emplace_back(next, end);
    next = end;
  }
  return PageTable::from_pages(page_size, num_pages, pages, kv_lens);
}

std::int64_t pages_needed(std::int32_t page_size, std::span<const std::int32_t> kv_lens) {
  std::int64_t pages = 0;
  for (const std::int32_t len : kv_lens) pages += (len + page_size - 1) / page_size;
  return pages;
}

std::vector<std::int32_t> indptr_of(std::span<const std::int32_t> lens) {
  std::vector<std::int32_t> indptr(1, 0);
  for (const std::int32_t len : lens) indptr.push_back(indptr.back() + len);
  return indptr;
}

}  // namespace fiw::cli
