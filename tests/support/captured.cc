#include "support/captured.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace fiw::test {

std::int32_t bucket_of(const GraphSession& session, std::int32_t batch) {
  return *std::ranges::lower_bound(session.buckets(), batch);
}

void expect_error(Status status, const std::string& part, const std::function<void()>& f) {
  try {
    f();
    ADD_FAILURE() << "accepted; expected an error with \"" << part << "\"";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

Captured::Captured(int device, const Case& c, Rng& rng) : rng_(rng.next_seed()), problem_(device, c, rng) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(num_pages()));
  std::iota(all.begin(), all.end(), 0);
  problem_.cache().fill(all, 0, static_cast<std::int32_t>(num_pages()) * c.page_size, rng_);
  problem_.cache().upload();
}

GraphOptions Captured::options(std::int32_t max_pages) const {
  return {.max_batch = max_batch(),
          .max_pages = max_pages,
          .page_size = problem_.table().page_size(),
          .num_pages = num_pages()};
}

PageTable Captured::random_table(std::int32_t batch, std::int32_t max_len) {
  const std::int32_t page_size = problem_.description().page_size;
  std::vector<std::vector<std::int32_t>> pages(static_cast<std::size_t>(batch));
  std::vector<std::int32_t> lens;
  for (auto& list : pages) {
    lens.push_back(rng_.chance(0.15) ? 0 : rng_.uniform(1, max_len));
    for (std::int32_t p = 0; p < (lens.back() + page_size - 1) / page_size; ++p) {
      list.push_back(rng_.uniform(0, static_cast<std::int32_t>(num_pages()) - 1));
    }
  }
  return PageTable::from_pages(page_size, num_pages(), pages, lens);
}

GraphSession Captured::session(FlashInferWorkspace& workspace, const GraphOptions& options) const {
  const StepSpec spec = problem_.spec();
  const Case& c = problem_.description();
  return c.op == Op::kDecode ? GraphSession::decode(workspace, {&spec, 1}, options)
                             : GraphSession::verify(workspace, c.qo_lens.front(), {&spec, 1}, options);
}

testing::AssertionResult Captured::step_is_right(GraphSession& session, const PageTable& table, Stream stream) {
  problem_.poison_outputs();
  session.step(table, stream);
  session.check(stream);
  return check(table, bucket_of(session, table.batch()));
}

void Captured::run(GraphSession& session, std::size_t kind) {
  session.run(problem_.q().device(), problem_.cache().device(), problem_.out().device(), problem_.device_lse(),
              problem_.device_extras(), nullptr, kind);
}

PageTable Captured::padded(const PageTable& table) const {
  std::vector<std::int32_t> indptr(table.indptr().begin(), table.indptr().end());
  std::vector<std::int32_t> last(table.last_page_len().begin(), table.last_page_len().end());
  indptr.resize(static_cast<std::size_t>(max_batch()) + 1, indptr.back());
  last.resize(static_cast<std::size_t>(max_batch()), 0);
  return PageTable::from_csr(problem_.description().page_size, num_pages(), indptr, table.indices(), last);
}

testing::AssertionResult Captured::check(const PageTable& table, std::int32_t bucket) {
  problem_.fetch_outputs();
  const Case& c = problem_.description();
  TestTensor& out = problem_.out();
  for (std::int64_t row = std::int64_t{bucket} * problem_.window(); row < out.rows(); ++row) {
    for (std::int64_t head = 0; head < out.heads(); ++head) {
      for (std::int64_t d = 0; d < out.dim(); ++d) {
        if (!std::isnan(out.at(row, head, d))) {
          return testing::AssertionFailure() << "row " << row << ", behind the bucket of " << bucket << ", was written";
        }
        out.set(row, head, d, 0.0F);
      }
      if (!c.lse) continue;
      float& lse = problem_.lse()[static_cast<std::size_t>(row * out.heads() + head)];
      if (!std::isnan(lse)) return testing::AssertionFailure() << "lse of row " << row << " was written";
      lse = -std::numeric_limits<float>::infinity();
    }
  }
  problem_.set_table(padded(table));
  return problem_.check() << "\n  with a table of " << table.batch() << " requests in a bucket of " << bucket;
}

}  // namespace fiw::test
