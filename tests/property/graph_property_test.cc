// What holds of graph sessions whatever they are made for, and whatever is called when it should not be.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "property/random_case.h"
#include "support/captured.h"
#include "support/live_arrays.h"

namespace fiw::test {
namespace {

constexpr std::int32_t kMaxLen = 300;

std::int32_t most_pages(const Case& c) {
  return static_cast<std::int32_t>(c.kv_lens.size()) * ((kMaxLen + c.page_size - 1) / c.page_size);
}

class GraphProperty : public testing::TestWithParam<int>, public Seeded {
 protected:
  GraphProperty() : stream_(GetParam()) {}

  /// As many requests of the greatest length as a step may have, with random layers.
  Case random_layer() {
    Case c = random_case(rng_.pick({Op::kDecode, Op::kVerify}), rng_);
    const auto batch = static_cast<std::size_t>(rng_.uniform(1, 9));
    c.qo_lens.assign(batch, c.op == Op::kDecode ? 1 : random_window(static_cast<std::int32_t>(batch), c.params));
    c.kv_lens.assign(batch, kMaxLen);
    // Such a call is not cut, and a captured one then needs the logarithms.
    if (c.params.window_left >= 0 && !c.params.causal) c.lse = true;
    return c;
  }
  /// A few tokens mostly, else up to the most of a session, as far as the reference has done with them soon.
  std::int32_t random_window(std::int32_t batch, const AttentionParams& params) {
    constexpr std::int32_t kMostRows = 20000;  // over all query heads
    const std::int32_t most = std::clamp(kMostRows / (batch * params.num_qo_heads), 16, 4096);
    return rng_.uniform(1, rng_.chance(0.6) ? 16 : most);
  }
  static Case plain_layer(std::int32_t batch) {
    return {.op = Op::kDecode,
            .params = {.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 128},
            .qo_lens = std::vector<std::int32_t>(static_cast<std::size_t>(batch), 1),
            .kv_lens = std::vector<std::int32_t>(static_cast<std::size_t>(batch), kMaxLen)};
  }
  std::vector<std::int32_t> random_buckets(std::int32_t max_batch) {
    std::vector<std::int32_t> buckets;
    if (rng_.chance(0.5)) return buckets;
    for (std::int32_t size = 1; size < max_batch; ++size) {
      if (rng_.chance(0.3)) buckets.push_back(size);
    }
    buckets.push_back(max_batch);
    return buckets;
  }
  testing::AssertionResult step_is_right(GraphSession& session, Captured& captured, const PageTable& table) {
    return captured.step_is_right(session, table, stream_.get());
  }

  TestStream stream_;
};

TEST_P(GraphProperty, AnyLayerAnyBucketsAnyTable) {
  enum class Table { kGiven, kLivePlanned, kLivePrepared };
  for (int round = 0; round < rounds(40); ++round) {
    const Case c = random_layer();
    Captured captured(GetParam(), c, rng_);
    SCOPED_TRACE(testing::Message() << "round " << round << ": " << c);
    WorkspaceOptions workspace_options{.num_threads = rng_.uniform(1, 3)};
    workspace_options.plan.batch_invariant = rng_.chance(0.3);
    workspace_options.plan.fixed_split_tokens = rng_.pick({1, 16, 100, 2048});
    // A session's memory is its own, whatever the workspace holds.
    if (rng_.chance(0.3)) workspace_options.workspace_bytes = 64, workspace_options.fixed_size = true;
    const auto workspace = make_workspace(GetParam(), workspace_options);
    GraphOptions options = captured.options(most_pages(c));
    options.buckets = random_buckets(options.max_batch);
    LiveArrays arrays(GetParam(), options.max_batch, options.max_pages);
    const Table source = rng_.pick({Table::kGiven, Table::kLivePlanned, Table::kLivePrepared});
    if (source != Table::kGiven) options.live_table = arrays.view(options.page_size, options.num_pages);
    options.plan_on_device = source == Table::kLivePlanned;
    GraphSession session = captured.session(*workspace, options);
    session.capture([&](std::int32_t) { captured.run(session); }, stream_.get());
    for (int i = 0; i < 5; ++i) {
      const PageTable table = captured.random_table(rng_.uniform(0, options.max_batch), kMaxLen);
      if (c.mask) captured.follow(table);
      if (source == Table::kGiven) {
        ASSERT_TRUE(step_is_right(session, captured, table));
        continue;
      }
      captured.problem().poison_outputs();
      arrays.put(table);
      if (source == Table::kLivePrepared) session.prepare(table, stream_.get());
      session.replay(table.batch(), stream_.get());
      session.check(stream_.get());
      ASSERT_TRUE(captured.check(table, bucket_of(session, table.batch())));
    }
    EXPECT_EQ(session.stats().captures, session.buckets().size());
  }
}

// All rows of q are alike, so that a request may change its place.
TEST_P(GraphProperty, BatchInvariantStepsGiveARequestTheSameBitsInAnyBatch) {
  for (int round = 0; round < 5; ++round) {
    const auto workspace =
        make_workspace(GetParam(), {.num_threads = 2, .plan = {.batch_invariant = true, .fixed_split_tokens = 64}});
    Captured captured(GetParam(), plain_layer(8), rng_);
    TestTensor& q = captured.problem().q();
    for (std::int64_t row = 1; row < q.rows(); ++row) {
      for (std::int64_t head = 0; head < q.heads(); ++head) {
        for (std::int64_t d = 0; d < q.dim(); ++d) q.set(row, head, d, q.at(0, head, d));
      }
    }
    q.upload();
    GraphSession session = captured.session(*workspace, captured.options(most_pages(captured.problem().description())));
    session.capture([&](std::int32_t) { captured.run(session); }, stream_.get());
    const PageTable all = captured.random_table(8, kMaxLen);
    ASSERT_TRUE(step_is_right(session, captured, all));
    TestTensor& out = captured.problem().out();
    TestTensor together(GetParam(), out.dtype(), out.rows(), out.heads(), out.dim(), Spacing::kContiguous);
    out.read_device_into(together);
    for (std::size_t r = 0; r < 8; ++r) {
      const auto first = static_cast<std::size_t>(all.indptr()[r]);
      const auto pages = static_cast<std::size_t>(all.page_counts()[r]);
      const std::vector<std::int32_t> indptr{0, all.page_counts()[r]};
      const PageTable alone =
          PageTable::from_csr(all.page_size(), all.num_pages(), indptr, all.indices().subspan(first, pages),
                              all.last_page_len().subspan(r, 1));
      ASSERT_TRUE(step_is_right(session, captured, alone));
      for (std::int64_t head = 0; head < together.heads(); ++head) {
        for (std::int64_t d = 0; d < together.dim(); ++d) {
          const float expected = together.at(static_cast<std::int64_t>(r), head, d);
          const float actual = out.at(0, head, d);
          ASSERT_EQ(std::memcmp(&expected, &actual, sizeof(float)), 0)
              << "request " << r << ", head " << head << ", element " << d << ": " << actual << " alone, " << expected
              << " among others";
        }
      }
    }
  }
}

TEST_P(GraphProperty, OnlyLayersBelongInTheBody) {
  const auto workspace = make_workspace(GetParam());
  Captured captured(GetParam(), plain_layer(4), rng_);
  GraphSession session = captured.session(*workspace, captured.options(most_pages(captured.problem().description())));
  const PageTable table = captured.random_table(4, kMaxLen);
  int calls = 0;
  const auto body = [&](std::int32_t) {
    ++calls;
    const std::vector<std::function<void()>> misplaced{[&] { session.capture([](std::int32_t) {}, stream_.get()); },
                                                       [&] { session.begin(1, stream_.get()); },
                                                       [&] { session.prepare(table, stream_.get()); },
                                                       [&] { session.step(table, stream_.get()); },
                                                       [&] { session.replay(1, stream_.get()); },
                                                       [&] { session.check(stream_.get()); }};
    for (const auto& call : misplaced) {
      expect_error(Status::kInvalidArgument, "within capture()'s body", call);
      std::thread([&] { expect_error(Status::kBusy, "another thread", call); }).join();
    }
    captured.run(session);
  };
  session.capture(body, stream_.get());
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(step_is_right(session, captured, table));
}

TEST_P(GraphProperty, ASecondCaptureReplacesTheFirstAndAFailedOneDoesNot) {
  const auto workspace = make_workspace(GetParam());
  Captured first(GetParam(), plain_layer(4), rng_);
  Captured second(GetParam(), plain_layer(4), rng_);
  GraphOptions options = first.options(most_pages(first.problem().description()));
  options.num_pages = std::min(first.num_pages(), second.num_pages());
  GraphSession session = first.session(*workspace, options);
  const auto capture = [&](Captured& captured, std::int32_t bad) {
    session.capture(
        [&session, &captured, bad](std::int32_t batch) {
          captured.run(session);
          if (batch == bad) throw std::runtime_error("a bad body");
        },
        stream_.get());
  };
  capture(first, 0);
  ASSERT_TRUE(step_is_right(session, first, first.random_table(3, kMaxLen)));
  capture(second, 0);
  first.problem().poison_outputs();
  ASSERT_TRUE(step_is_right(session, second, second.random_table(3, kMaxLen)));
  first.problem().fetch_outputs();
  EXPECT_TRUE(first.problem().outputs_untouched());
  for (const std::int32_t bad : {1, 2, 4}) {
    EXPECT_THROW(capture(first, bad), std::runtime_error);
    ASSERT_TRUE(step_is_right(session, second, second.random_table(3, kMaxLen)));
  }
  EXPECT_EQ(session.stats().captures, 6U);
}

TEST_P(GraphProperty, TablesOfNoRequestsAndRequestsOfNoPages) {
  const auto workspace = make_workspace(GetParam());
  Captured captured(GetParam(), plain_layer(4), rng_);
  GraphSession session = captured.session(*workspace, captured.options(most_pages(captured.problem().description())));
  session.capture([&](std::int32_t) { captured.run(session); }, stream_.get());
  const PageTable full = captured.random_table(4, kMaxLen);
  const std::vector<std::int32_t> none(5, 0);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(step_is_right(session, captured, PageTable()));
    ASSERT_TRUE(step_is_right(session, captured, full));
    const PageTable pageless =
        PageTable::from_csr(full.page_size(), full.num_pages(), none, {}, std::span(none).first(4));
    ASSERT_TRUE(step_is_right(session, captured, pageless));
    ASSERT_TRUE(step_is_right(session, captured, PageTable::from_pages(full.page_size(), full.num_pages(), {}, {})));
  }
}

TEST_P(GraphProperty, ARequestOfTokensThat32BitsDoNotCountIsStopped) {
  const auto workspace = make_workspace(GetParam());
  GraphOptions options{.max_batch = 2, .max_pages = 4, .page_size = 1 << 30, .num_pages = 4};
  LiveArrays arrays(GetParam(), 2, 4);
  options.live_table = arrays.view(options.page_size, options.num_pages);
  const StepSpec spec{.params = {.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 128}};
  GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, options);
  session.capture([](std::int32_t) {}, stream_.get());
  for (const std::int32_t last : {1 << 30, 1}) {
    arrays.indptr.host() = {0, 1, 4};
    arrays.indices.host() = {0, 1, 2, 3};
    arrays.last_page_len.host() = {5, last};
    arrays.upload();
    session.replay(2, stream_.get());
    expect_error(Status::kStalePlan, "request 1 has 3 pages", [&] { session.check(stream_.get()); });
    arrays.indptr.host() = {0, 1, 2};
    arrays.upload();
    session.replay(2, stream_.get());
    EXPECT_NO_THROW(session.check(stream_.get()));
  }
}

TEST_P(GraphProperty, MovedFromSessionsSaySo) {
  const auto workspace = make_workspace(GetParam());
  Captured captured(GetParam(), plain_layer(4), rng_);
  const GraphOptions options = captured.options(most_pages(captured.problem().description()));
  GraphSession session = captured.session(*workspace, options);
  GraphSession* current = &session;
  session.capture([&](std::int32_t) { captured.run(*current); }, stream_.get());
  GraphSession moved = std::move(session);
  current = &moved;
  const PageTable table = captured.random_table(4, kMaxLen);
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_error(Status::kInvalidArgument, "moved from", [&] { session.step(table, stream_.get()); });
  expect_error(Status::kInvalidArgument, "moved from", [&] { session.check(stream_.get()); });
  EXPECT_TRUE(session.buckets().empty());
  EXPECT_EQ(session.stats().captures, 0U);
  // NOLINTEND(bugprone-use-after-move)
  ASSERT_TRUE(step_is_right(moved, captured, table));
  session = captured.session(*workspace, options);
  current = &session;
  session.capture([&](std::int32_t) { captured.run(*current); }, stream_.get());
  moved = std::move(session);
  current = &moved;
  EXPECT_TRUE(step_is_right(moved, captured, table));
}

TEST_P(GraphProperty, ABodyMayEndItsSession) {
  const auto workspace = make_workspace(GetParam());
  Captured captured(GetParam(), plain_layer(2), rng_);
  std::optional<GraphSession> session =
      captured.session(*workspace, captured.options(most_pages(captured.problem().description())));
  session->capture(
      [&](std::int32_t batch) {
        captured.run(*session);
        if (batch == 2) session.reset();
      },
      stream_.get());
  captured.problem().call(*workspace);
  EXPECT_TRUE(captured.problem().check());
}

TEST_P(GraphProperty, TwoSessionsOnTwoStreamsAndTheWorkspaceBesideThem) {
  const auto workspace = make_workspace(GetParam(), {.workspace_bytes = 64});
  const TestStream other_stream(GetParam());
  Captured one(GetParam(), plain_layer(8), rng_);
  Case window = plain_layer(5);
  window.op = Op::kVerify;
  window.qo_lens.assign(5, 4);
  Captured two(GetParam(), window, rng_);
  Problem eager(GetParam(), plain_layer(3), rng_);
  GraphSession first = one.session(*workspace, one.options(most_pages(one.problem().description())));
  GraphSession second = two.session(*workspace, two.options(most_pages(window)));
  first.capture([&](std::int32_t) { one.run(first); }, stream_.get());
  second.capture([&](std::int32_t) { two.run(second); }, other_stream.get());
  for (int i = 0; i < 30; ++i) {
    const PageTable a = one.random_table(rng_.uniform(0, 8), kMaxLen);
    const PageTable b = two.random_table(rng_.uniform(0, 5), kMaxLen);
    one.problem().poison_outputs();
    two.problem().poison_outputs();
    first.step(a, stream_.get());
    second.step(b, other_stream.get());
    eager.call(*workspace);
    first.check(stream_.get());
    second.check(other_stream.get());
    ASSERT_TRUE(one.check(a, bucket_of(first, a.batch())));
    ASSERT_TRUE(two.check(b, bucket_of(second, b.batch())));
    ASSERT_TRUE(eager.check());
  }
}

TEST_P(GraphProperty, ThreadsThatFightOverASessionAreServedOrRefused) {
  const auto workspace = make_workspace(GetParam(), {.num_threads = 2});
  Captured captured(GetParam(), plain_layer(4), rng_);
  GraphSession session = captured.session(*workspace, captured.options(most_pages(captured.problem().description())));
  session.capture([&](std::int32_t) { captured.run(session); }, stream_.get());
  std::vector<PageTable> tables;
  for (int i = 0; i < 8; ++i) tables.push_back(captured.random_table(rng_.uniform(0, 4), kMaxLen));
  std::atomic<int> served = 0;
  std::barrier start(2);
  const auto fight = [&](std::uint64_t seed) {
    Rng rng(seed);
    start.arrive_and_wait();
    for (int i = 0; i < 200; ++i) {
      try {
        session.step(rng.pick(tables), stream_.get());
        ++served;
      } catch (const Error& error) {
        // The other thread may have prepared another bucket between this one's plan and its replay.
        const bool overtaken = error.reason() == Reason::kBatch;
        EXPECT_TRUE(error.status() == Status::kBusy || overtaken) << error.what();
      }
    }
  };
  std::thread other(fight, rng_.next_seed());
  fight(rng_.next_seed());
  other.join();
  EXPECT_GT(served, 0);
  session.check(stream_.get());
  EXPECT_TRUE(step_is_right(session, captured, tables.front()));
}

/// Memory of which only so many pieces are given, on the CPU.
class ScarceMemory {
 public:
  Allocator allocator() {
    return {.allocate = [](void* self, std::size_t bytes, std::size_t, Stream) -> void* {
              return static_cast<ScarceMemory*>(self)->take(bytes);
            },
            .free = [](void* self, void* memory, std::size_t bytes,
                       Stream) { static_cast<ScarceMemory*>(self)->put_back(memory, bytes); },
            .context = this};
  }
  int left = 0;
  std::map<void*, std::size_t> live;

 private:
  static constexpr std::align_val_t kAlignment{64};

  void* take(std::size_t bytes) {
    if (left == 0) return nullptr;
    --left;
    void* const memory = ::operator new(bytes, kAlignment);
    live[memory] = bytes;
    return memory;
  }
  void put_back(void* memory, std::size_t bytes) {
    EXPECT_EQ(live.at(memory), bytes);
    live.erase(memory);
    ::operator delete(memory, kAlignment);
  }
};

/// The CPU, where a test can lend memory, and where what follows begin() computes at once.
class CpuGraph : public GraphProperty {};

TEST_P(CpuGraph, ABegunStepComputesWhatWasPreparedAndEndsWithTheNextPrepare) {
  const auto workspace = make_workspace(GetParam());
  Captured captured(GetParam(), plain_layer(8), rng_);
  GraphSession session = captured.session(*workspace, captured.options(most_pages(captured.problem().description())));
  for (int i = 0; i < 10; ++i) {
    captured.problem().poison_outputs();
    const std::int32_t other = session.begin(i % 2 == 0 ? 8 : 1, stream_.get());
    const PageTable table = captured.random_table(3, kMaxLen);
    const std::int32_t bucket = session.prepare(table, stream_.get());
    ASSERT_NE(bucket, other);
    expect_error(Status::kInvalidArgument, "no step was begun", [&] { captured.run(session); });
    session.begin(other, stream_.get());
    captured.run(session);  // as in a capture: nothing is planned for this bucket
    captured.problem().fetch_outputs();
    ASSERT_TRUE(captured.problem().outputs_untouched());
    session.begin(bucket, stream_.get());
    captured.run(session);
    ASSERT_TRUE(captured.check(table, bucket));
  }
}

TEST_P(CpuGraph, ASessionIsMadeWholeOrNotAtAll) {
  ScarceMemory memory;
  memory.left = 100;
  Captured captured(GetParam(), plain_layer(4), rng_);
  {
    const auto workspace = make_workspace(GetParam(), {.allocator = memory.allocator()});
    const GraphOptions options = captured.options(most_pages(captured.problem().description()));
    captured.problem().call(*workspace);
    const std::size_t before = memory.live.size();
    std::optional<GraphSession> session;
    for (int pieces = 0; !session; ++pieces) {
      memory.left = pieces;
      try {
        session = captured.session(*workspace, options);
        EXPECT_EQ(pieces, 2);
      } catch (const Error& error) {
        ASSERT_EQ(error.status(), Status::kOutOfMemory) << error.what();
        EXPECT_GT(error.bytes_required(), 0U);
        ASSERT_EQ(memory.live.size(), before);
        captured.problem().call(*workspace);
        ASSERT_TRUE(captured.problem().check());
      }
    }
    std::size_t bytes = 0;
    for (const auto& [piece, size] : memory.live) bytes += size;
    session->capture([&](std::int32_t) { captured.run(*session); }, stream_.get());
    for (int i = 0; i < 5; ++i) {
      ASSERT_TRUE(step_is_right(*session, captured, captured.random_table(rng_.uniform(0, 4), kMaxLen)));
    }
    session.reset();
    EXPECT_EQ(memory.live.size(), before);
    for (const auto& [piece, size] : memory.live) bytes -= size;
    EXPECT_GT(bytes, 0U);
  }
  EXPECT_TRUE(memory.live.empty());
}

INSTANTIATE_TEST_SUITE_P(Backends, GraphProperty, testing::ValuesIn(compiled_devices()), device_test_name);
INSTANTIATE_TEST_SUITE_P(Backends, CpuGraph, testing::Values(kCpuDevice), device_test_name);

}  // namespace
}  // namespace fiw::test
