// Recomputes randomly chosen output rows of a replay with the reference, from the tokens themselves rather than from
// the cache: a wrong page, length, plan or kernel shows, and so does a wrong append.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "compare.h"
#include "fiw/attention.h"
#include "scheduler.h"
#include "token_data.h"

namespace fiw::cli {

/// The two kinds of attention call in a step.
enum class Work : std::uint8_t { kPrefill, kDecode };
inline constexpr std::size_t kWorkKinds = 2;

/// Query tokens of one request, as they lie in a call's tensors.
struct RowSpan {
  std::int32_t request = 0;
  std::int32_t start = 0;  ///< position of the first one in the request
  std::int32_t count = 0;
};

class RowCheck {
 public:
  /// Chooses `rows` (or all, if there are fewer) of the `totals` rows x `layers` that a replay will compute: half of
  /// each kind where possible, and each kind's spread evenly over the whole run, with a random place in every stretch.
  RowCheck(std::int64_t rows, const SchedulerTotals& totals, std::int32_t layers, const AttentionParams& params,
           const Tolerance& out_tolerance, std::uint64_t seed);

  /// To be called after every attention call, before the step is finished; looks at the chosen rows among the call's.
  void check(Work work, const Scheduler& scheduler, const TokenData& data, std::int64_t step, std::int32_t layer,
             const std::vector<RowSpan>& spans, const ConstTensor& q, const ConstTensor& out, const float* lse);

  std::int64_t checked_rows() const noexcept { return checked_rows_; }
  const ErrorGauge& out_errors() const noexcept { return out_errors_; }
  const ErrorGauge& lse_errors() const noexcept { return lse_errors_; }
  bool ok() const noexcept { return out_errors_.failures() == 0 && lse_errors_.failures() == 0; }
  /// The first row out of tolerance, in words; empty when there is none.
  const std::string& first_failure() const noexcept { return first_failure_; }

 private:
  struct Sample {
    std::vector<std::int64_t> chosen;  ///< ascending, counted over all calls of the kind
    std::size_t next = 0;
    std::int64_t passed = 0;  ///< rows of the calls so far
  };

  void check_row(const Scheduler& scheduler, const TokenData& data, std::int32_t request, std::int32_t position,
                 std::int32_t layer, const ConstTensor& q, const ConstTensor& out, const float* lse,
                 const std::string& where);

  AttentionParams params_;
  std::array<Sample, kWorkKinds> samples_;
  ErrorGauge out_errors_;
  ErrorGauge lse_errors_{kLseTolerance};
  std::int64_t checked_rows_ = 0;
  std::string first_failure_;
};

}  // namespace fiw::cli
