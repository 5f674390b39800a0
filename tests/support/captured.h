// One attention problem as a graph session sees it: the same tensors, table after table.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fiw/graph.h"
#include "support/problem.h"
#include "support/stream.h"

namespace fiw::test {

/// The bucket that a step of `batch` requests runs in.
std::int32_t bucket_of(const GraphSession& session, std::int32_t batch);

/// Calls `f`, which must throw an Error of this status whose message holds `part`.
void expect_error(Status status, const std::string& part, const std::function<void()>& f);

/// A decode or verify case whose pool is full of values, so that any page may belong to any request.
class Captured {
 public:
  /// `c` has as many requests as the session's largest batch.
  Captured(int device, const Case& c, Rng& rng);

  Problem& problem() { return problem_; }
  StepSpec spec() const { return problem_.spec(); }
  std::int64_t num_pages() const { return problem_.table().num_pages(); }
  std::int32_t max_batch() const { return static_cast<std::int32_t>(problem_.description().kv_lens.size()); }
  /// What the session must allow for.
  GraphOptions options(std::int32_t max_pages) const;

  /// A table of `batch` requests of up to `max_len` tokens, some without any, on any pages.
  PageTable random_table(std::int32_t batch, std::int32_t max_len);
  /// Before a step with this table where the layer has a mask: makes one for it, in place.
  void follow(const PageTable& table) { problem_.set_table(padded(table)); }
  /// A session for steps of the layer.
  GraphSession session(FlashInferWorkspace& workspace, const GraphOptions& options) const;
  /// The layer's call, within a capture.
  void run(GraphSession& session, std::size_t kind = 0);
  /// Checks what a step with this table left in the outputs, of a bucket of `bucket` requests: all its rows against the
  /// reference, those of requests that are not there for emptiness, and the rows behind the bucket for being untouched.
  testing::AssertionResult check(const PageTable& table, std::int32_t bucket);
  /// Poisons the outputs, makes a step of `session` with this table, and checks it.
  testing::AssertionResult step_is_right(GraphSession& session, const PageTable& table, Stream stream);

 private:
  PageTable padded(const PageTable& table) const;

  Rng rng_;
  Problem problem_;
};

}  // namespace fiw::test
