// The q, K and V of a replay: made up, but a function of which token stands where, so that any result can be recomputed
// from the requests alone, whatever pages the tokens went through.
#pragma once

#include <cstdint>

#include "fiw/attention.h"
#include "fiw/types.h"
#include "scheduler.h"

namespace fiw::cli {

/// Values are small multiples of 1/8, exact in every element type that a cache or a query can have, so what is read
/// back is what was made. Each query leans towards the key of one earlier token of its request, chosen at random for
/// each head: losing or misplacing a page then changes the result by far more than rounding does.
class TokenData {
 public:
  TokenData(std::uint64_t seed, const AttentionParams& params);

  /// K and V of tokens start .. start+count of a request, into k and v [count, num_kv_heads, head_dim] from `row` on.
  void write_kv(const Scheduler& scheduler, std::int32_t request, std::int32_t start, std::int32_t count,
                std::int32_t layer, const Tensor& k, const Tensor& v, std::int64_t row) const;
  /// Their queries, into q [count, num_qo_heads, head_dim] from `row` on.
  void write_q(const Scheduler& scheduler, std::int32_t request, std::int32_t start, std::int32_t count,
               std::int32_t layer, const Tensor& q, std::int64_t row) const;

 private:
  std::uint64_t seed_;
  std::int32_t num_qo_heads_;
  std::int32_t num_kv_heads_;
  std::int32_t head_dim_;
};

/// What K and V are divided by in fp8 caches: a power of two, so that their values stay exact.
inline constexpr float kReplayFp8Scale = 0.25F;

}  // namespace fiw::cli
