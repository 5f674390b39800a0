// Random tensors and page lists for `check` and `bench`.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fiw/kv_cache.h"
#include "fiw/page_table.h"
#include "fiw/types.h"

namespace fiw::cli {

/// Bell-shaped values around 0 with a deviation of about 1, rounded to the tensor's type.
void fill_random(const Tensor& tensor, std::uint64_t seed);
/// As above for `count` elements in a row.
void fill_random(void* data, DType dtype, std::int64_t count, std::uint64_t seed);

/// A table for requests of the given lengths over pages drawn at random, none twice, from a pool of `num_pages`, which
/// must be enough.
PageTable scattered_table(std::int32_t page_size, std::int64_t num_pages, std::span<const std::int32_t> kv_lens,
                          std::uint64_t seed);
/// Pages that such requests need.
std::int64_t pages_needed(std::int32_t page_size, std::span<const std::int32_t> kv_lens);

/// 0, then running sums.
std::vector<std::int32_t> indptr_of(std::span<const std::int32_t> lens);

}  // namespace fiw::cli
