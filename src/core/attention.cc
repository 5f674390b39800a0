// Helpers that prepare an attention call's optional inputs on the host.
#include "fiw/attention.h"

#include <cmath>
#include <limits>

#include "core/fail.h"

namespace fiw {

std::vector<float> default_alibi_slopes(std::int32_t num_qo_heads) {
  if (num_qo_heads < 1) fail(Reason::kHeadCount, "num_qo_heads is {}, expected at least 1", num_qo_heads);
  std::int32_t power = 1;
  while (power <= num_qo_heads / 2) power *= 2;
  std::vector<float> slopes;
  slopes.reserve(static_cast<std::size_t>(num_qo_heads));
  for (std::int32_t i = 1; i <= power; ++i)
    slopes.push_back(std::exp2(-8.0F * static_cast<float>(i) / static_cast<float>(power)));
  for (std::int32_t i = 1; static_cast<std::int32_t>(slopes.size()) < num_qo_heads; i += 2) {
    slopes.push_back(std::exp2(-4.0F * static_cast<float>(i) / static_cast<float>(power)));
  }
  return slopes;
}

std::vector<std::uint8_t> pack_mask(std::span<const std::uint8_t> booleans, std::span<const std::int32_t> qo_lens,
                                    std::span<const std::int32_t> kv_lens, std::vector<std::int32_t>& mask_indptr) {
  if (qo_lens.size() != kv_lens.size()) {
    fail(Reason::kBatch, "kv_lens has {} requests, qo_lens has {}", kv_lens.size(), qo_lens.size());
  }
  std::vector<std::int32_t> indptr{0};
  std::int64_t bits = 0;
  std::int64_t bytes = 0;
  for (std::size_t r = 0; r < qo_lens.size(); ++r) {
    if (qo_lens[r] < 0) fail_at(r, Reason::kMask, "qo_lens[{}] is {}, expected at least 0", r, qo_lens[r]);
    if (kv_lens[r] < 0) fail_at(r, Reason::kMask, "kv_lens[{}] is {}, expected at least 0", r, kv_lens[r]);
    const std::int64_t request_bits = static_cast<std::int64_t>(qo_lens[r]) * kv_lens[r];
    bits += request_bits;
    bytes += (request_bits + 7) / 8;
    if (bytes > std::numeric_limits<std::int32_t>::max()) {
      fail_at(r, Reason::kSizeOverflow, "the packed mask of requests 0..{} takes {} bytes, more than int32 holds", r,
              bytes);
    }
    indptr.push_back(static_cast<std::int32_t>(bytes));
  }
  if (static_cast<std::int64_t>(booleans.size()) != bits) {
    fail(Reason::kMask, "booleans has {} entries, qo_lens and kv_lens say {}", booleans.size(), bits);
  }
  std::vector<std::uint8_t> packed(static_cast<std::size_t>(bytes), 0);
  std::size_t next = 0;
  for (std::size_t r = 0; r < qo_lens.size(); ++r) {
    const auto first_byte = static_cast<std::size_t>(indptr[r]);
    const std::size_t request_bits = static_cast<std::size_t>(qo_lens[r]) * static_cast<std::size_t>(kv_lens[r]);
    for (std::size_t bit = 0; bit < request_bits; ++bit) {
      if (booleans[next++] != 0)
        packed[first_byte + bit / 8] = static_cast<std::uint8_t>(packed[first_byte + bit / 8] | (1U << (bit % 8)));
    }
  }
  mask_indptr = std::move(indptr);
  return packed;
}

}  // namespace fiw
