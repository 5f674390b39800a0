// Counter-based pseudo-random vectors: sixteen 4-bit levels out of every mixed 64-bit word.
#include "token_data.h"

#include <array>

#include "core/numeric.h"
#include "mix.h"

namespace fiw::cli {
namespace {

enum class Role : std::uint64_t { kKey, kValue, kQuery, kTarget };

constexpr std::int32_t kMaxHeadDim = 576;
constexpr std::int32_t kTokensForThreads = 16;  // a whole chunk of a prompt rather than a decode window
constexpr float kKvUnit = 0.25F;
constexpr float kQueryUnit = 0.125F;

using Levels = std::array<std::int8_t, kMaxHeadDim>;

std::uint64_t vector_id(std::uint64_t token, Role role, std::int32_t layer, std::int32_t head) noexcept {
  return mix(token, static_cast<std::uint64_t>(role) << 48 | static_cast<std::uint64_t>(layer) << 24 |
                        static_cast<std::uint64_t>(head));
}

/// Levels from -8 to 7, all equally likely.
void make_levels(std::uint64_t id, std::int32_t dim, Levels& levels) noexcept {
  for (std::int32_t d = 0; d < dim; d += 16) {
    std::uint64_t word = mix(id + static_cast<std::uint64_t>(d));
    for (std::int32_t i = 0; i < 16; ++i, word >>= 4) {
      levels[d + i] = static_cast<std::int8_t>(static_cast<std::int32_t>(word & 15U) - 8);
    }
  }
}

/// The tokens of one request, each named by what it depends on: a shared prompt block's tokens are the same token in
/// every request that starts with that block.
class Tokens {
 public:
  Tokens(std::uint64_t seed, const Scheduler& scheduler, std::int32_t request)
      : seed_(seed),
        state_(scheduler.state(request)),
        request_(static_cast<std::uint64_t>(request)),
        prompt_(scheduler.request(request).prompt_tokens) {}

  std::uint64_t operator[](std::int32_t position) const {
    const auto at = static_cast<std::uint64_t>(position);
    if (position >= prompt_) {  // a draft that was rolled back is another token than the one that took its place
      return mix(seed_, 2U, request_, at, state_.written_in_step[position - prompt_]);
    }
    const auto block = static_cast<std::size_t>(position / kHashBlockTokens);
    if (block < state_.prefixes.size()) return mix(seed_, 1U, state_.prefixes[block], at);
    return mix(seed_, 0U, request_, at);
  }

 private:
  std::uint64_t seed_;
  const RequestState& state_;
  std::uint64_t request_;
  std::int32_t prompt_;
};

void store(const Levels& levels, float unit, const Tensor& tensor, std::int64_t row, std::int64_t head) noexcept {
  const std::int64_t at = row * tensor.row_stride + head * tensor.head_stride;
  if (tensor.dtype == DType::kBFloat16) {  // the usual case, without a switch for every element
    auto* out = static_cast<std::uint16_t*>(tensor.data) + at;
    for (std::int64_t d = 0; d < tensor.dim; ++d) out[d] = float_to_bf16(static_cast<float>(levels[d]) * unit);
    return;
  }
  for (std::int64_t d = 0; d < tensor.dim; ++d) {
    store_float(tensor.data, tensor.dtype, at + d, static_cast<float>(levels[d]) * unit);
  }
}

}  // namespace

TokenData::TokenData(std::uint64_t seed, const AttentionParams& params)
    : seed_(seed),
      num_qo_heads_(params.num_qo_heads),
      num_kv_heads_(params.num_kv_heads),
      head_dim_(params.head_dim_qk) {}

void TokenData::write_kv(const Scheduler& scheduler, std::int32_t request, std::int32_t start, std::int32_t count,
                         std::int32_t layer, const Tensor& k, const Tensor& v, std::int64_t row) const {
  const Tokens tokens(seed_, scheduler, request);
#pragma omp parallel for if (count >= kTokensForThreads)
  for (std::int32_t t = 0; t < count; ++t) {
    Levels levels;
    const std::uint64_t token = tokens[start + t];
    for (std::int32_t head = 0; head < num_kv_heads_; ++head) {
      make_levels(vector_id(token, Role::kKey, layer, head), head_dim_, levels);
      store(levels, kKvUnit, k, row + t, head);
      make_levels(vector_id(token, Role::kValue, layer, head), head_dim_, levels);
      store(levels, kKvUnit, v, row + t, head);
    }
  }
}

void TokenData::write_q(const Scheduler& scheduler, std::int32_t request, std::int32_t start, std::int32_t count,
                        std::int32_t layer, const Tensor& q, std::int64_t row) const {
  const Tokens tokens(seed_, scheduler, request);
  const std::int32_t group = num_qo_heads_ / num_kv_heads_;
#pragma omp parallel for if (count >= kTokensForThreads)
  for (std::int32_t t = 0; t < count; ++t) {
    Levels levels;
    Levels target;
    const std::uint64_t token = tokens[start + t];
    for (std::int32_t head = 0; head < num_qo_heads_; ++head) {
      const auto seen = static_cast<std::uint64_t>(start + t) + 1;
      const auto position = static_cast<std::int32_t>(vector_id(token, Role::kTarget, layer, head) % seen);
      make_levels(vector_id(tokens[position], Role::kKey, layer, head / group), head_dim_, target);
      make_levels(vector_id(token, Role::kQuery, layer, head), head_dim_, levels);
      for (std::int32_t d = 0; d < head_dim_; ++d) levels[d] = static_cast<std::int8_t>(levels[d] + target[d]);
      store(levels, kQueryUnit, q, row + t, head);
    }
  }
}

}  // namespace fiw::cli
