// Graph sessions: what was captured once is right for every later table, and what it cannot serve is said.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/captured.h"
#include "support/live_arrays.h"

namespace fiw::test {
namespace {

constexpr std::int32_t kMaxBatch = 8;
constexpr std::int32_t kMaxLen = 700;

Case decode_case(std::int32_t qo_heads = 8, std::int32_t kv_heads = 2) {
  return {.op = Op::kDecode,
          .params = {.num_qo_heads = qo_heads, .num_kv_heads = kv_heads, .head_dim_qk = 128},
          .qo_lens = std::vector<std::int32_t>(kMaxBatch, 1),
          .kv_lens = std::vector<std::int32_t>(kMaxBatch, 100)};
}

Case verify_case(std::int32_t window) {
  Case c = decode_case();
  c.op = Op::kVerify;
  c.qo_lens.assign(kMaxBatch, window);
  return c;
}

std::int32_t most_pages(const Case& c, std::int32_t max_len = kMaxLen) {
  return kMaxBatch * ((max_len + c.page_size - 1) / c.page_size);
}

class Graph : public testing::TestWithParam<int>, public Seeded {
 protected:
  Graph() : stream_(GetParam()), workspace_(make_workspace(GetParam())) {}

  GraphSession session_for(const Captured& captured, const GraphOptions& options) {
    return captured.session(*workspace_, options);
  }
  /// A session with the layer captured.
  GraphSession capture(Captured& captured, const GraphOptions& options) {
    GraphSession session = session_for(captured, options);
    session.capture([&](std::int32_t) { captured.run(*current_); }, capturing(session));
    return session;
  }
  GraphSession capture(Captured& captured) {
    return capture(captured, captured.options(most_pages(captured.problem().description())));
  }
  /// The stream, and `session` as the one that run() is called on while it captures.
  Stream capturing(GraphSession& session) {
    current_ = &session;
    return stream_.get();
  }
  testing::AssertionResult step_is_right(GraphSession& session, Captured& captured, const PageTable& table) {
    current_ = &session;
    return captured.step_is_right(session, table, stream_.get());
  }

  TestStream stream_;
  std::unique_ptr<FlashInferWorkspace> workspace_;
  GraphSession* current_ = nullptr;
};

TEST_P(Graph, DecodeFollowsAnyTableWithoutAnotherCapture) {
  for (const auto& [qo_heads, kv_heads] : {std::pair{8, 2}, {4, 4}, {7, 1}}) {
    Captured captured(GetParam(), decode_case(qo_heads, kv_heads), rng_);
    GraphSession session = capture(captured);
    for (int i = 0; i < 25; ++i) {
      ASSERT_TRUE(step_is_right(session, captured,
                                captured.random_table(rng_.uniform(0, kMaxBatch), rng_.uniform(1, kMaxLen))));
    }
    EXPECT_EQ(session.stats().captures, session.buckets().size());
    EXPECT_EQ(session.stats().replays, 25U);
  }
}

TEST_P(Graph, VerifyWindowsOfEveryLength) {
  for (std::int32_t window = 1; window <= 16; ++window) {
    Captured captured(GetParam(), verify_case(window), rng_);
    GraphSession session = capture(captured);
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(
          step_is_right(session, captured, captured.random_table(rng_.uniform(1, kMaxBatch), rng_.uniform(1, kMaxLen))))
          << "window " << window;
    }
  }
}

// Windows as long as chunks of a prompt, whose rows are many tiles; some requests have fewer tokens.
TEST_P(Graph, WindowsOfManyTiles) {
  for (const std::int32_t window : {17, 64, 127, 577, 4096}) {
    const std::int32_t max_batch = window > 1000 ? 1 : 4;
    const std::int32_t max_len = window + kMaxLen;
    const Case c{.op = Op::kVerify,
                 .params = {.num_qo_heads = 4, .num_kv_heads = 1, .head_dim_qk = 64},
                 .qo_lens = std::vector<std::int32_t>(static_cast<std::size_t>(max_batch), window),
                 .kv_lens = std::vector<std::int32_t>(static_cast<std::size_t>(max_batch), window)};
    Captured captured(GetParam(), c, rng_);
    GraphSession session = capture(captured, captured.options(most_pages(c, max_len)));
    for (int i = 0; i < 3; ++i) {
      const PageTable table = captured.random_table(rng_.uniform(1, max_batch), max_len);
      ASSERT_TRUE(step_is_right(session, captured, table)) << "window " << window;
    }
  }
}

TEST_P(Graph, TreeMasks) {
  Case c = verify_case(5);
  c.mask = true;
  c.kv_lens = {5, 33, 1, 260, 0, 17, 64, 100};
  Captured captured(GetParam(), c, rng_);
  const PageTable table = captured.problem().table();
  GraphSession session = capture(captured);
  EXPECT_TRUE(step_is_right(session, captured, table));
}

TEST_P(Graph, MasksMayBeRewrittenBetweenSteps) {
  Case c = verify_case(5);
  c.mask = true;
  c.kv_lens.assign(kMaxBatch, 200);
  Captured captured(GetParam(), c, rng_);
  GraphSession session = capture(captured);
  for (int i = 0; i < 20; ++i) {
    const PageTable table = captured.random_table(rng_.uniform(0, kMaxBatch), 200);
    captured.follow(table);
    ASSERT_TRUE(step_is_right(session, captured, table));
  }
}

TEST_P(Graph, OneRequestGrowsWithinAPageAndBeyond) {
  Captured captured(GetParam(), decode_case(), rng_);
  GraphSession session = capture(captured);
  PageTable table = captured.random_table(3, 40);
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(step_is_right(session, captured, table));
    std::vector<std::int32_t> fresh(static_cast<std::size_t>(table.pages_needed(1)));
    for (std::int32_t& page : fresh) page = rng_.uniform(0, static_cast<std::int32_t>(captured.num_pages()) - 1);
    table.advance(1, fresh);
  }
  const GraphStats stats = session.stats();
  EXPECT_EQ(stats.plans + stats.plan_hits, 40U);
  EXPECT_GT(stats.plan_hits, 30U - 3U * 40U / 16U);
  EXPECT_LT(stats.plans, 12U);
}

TEST_P(Graph, KindsOfLayersAlternate) {
  Case windowed = decode_case();
  windowed.params.window_left = 50;
  Captured full(GetParam(), decode_case(), rng_);
  Captured local(GetParam(), windowed, rng_);
  const std::vector<StepSpec> kinds{full.spec(), local.spec()};
  GraphOptions options = full.options(most_pages(full.problem().description()));
  options.num_pages = std::min(full.num_pages(), local.num_pages());
  GraphSession session = GraphSession::decode(*workspace_, kinds, options);
  session.capture(
      [&](std::int32_t) {
        for (int layer = 0; layer < 4; ++layer) {
          full.run(session, 0);
          local.run(session, 1);
        }
      },
      stream_.get());
  for (int i = 0; i < 10; ++i) {
    const PageTable table = full.random_table(rng_.uniform(1, kMaxBatch), kMaxLen);
    full.problem().poison_outputs();
    local.problem().poison_outputs();
    session.step(table, stream_.get());
    session.check(stream_.get());
    ASSERT_TRUE(full.check(table, bucket_of(session, table.batch())));
    ASSERT_TRUE(local.check(table, bucket_of(session, table.batch())));
  }
}

// Eager plans of every kind, invalidations, and two sessions at once: none may disturb another.
TEST_P(Graph, AnythingBetweenReplays) {
  Captured decoding(GetParam(), decode_case(), rng_);
  Captured verifying(GetParam(), verify_case(5), rng_);
  GraphSession decode = capture(decoding);
  GraphSession verify = capture(verifying);
  Case chunk = decode_case();
  chunk.op = Op::kPrefill;
  chunk.qo_lens = {3, 0, 40, 1, 0, 7, 2, 9};
  std::vector<std::unique_ptr<Problem>> eager;
  for (const Case& c : {decode_case(), verify_case(3), chunk}) {
    eager.push_back(std::make_unique<Problem>(GetParam(), c, rng_));
  }
  for (int i = 0; i < rounds(250); ++i) {
    switch (rng_.uniform(0, 7)) {
      case 0:
        workspace_->invalidate_runtime_cache();
        break;
      case 1:
        workspace_->invalidate_verify_runtime_cache();
        break;
      case 2:
        workspace_->invalidate_prefill_runtime_cache();
        break;
      case 3:
      case 4: {
        Problem& problem = *eager[static_cast<std::size_t>(rng_.uniform(0, 2))];
        problem.call(*workspace_);
        ASSERT_TRUE(problem.check());
        break;
      }
      case 5:
      case 6:
        ASSERT_TRUE(step_is_right(decode, decoding, decoding.random_table(rng_.uniform(0, kMaxBatch), 300)));
        break;
      default:
        ASSERT_TRUE(step_is_right(verify, verifying, verifying.random_table(rng_.uniform(0, kMaxBatch), 300)));
    }
  }
}

TEST_P(Graph, InvalidationDropsThePlanOfItsScope) {
  Captured captured(GetParam(), verify_case(4), rng_);
  GraphSession session = capture(captured);
  const PageTable table = captured.random_table(4, kMaxLen);
  ASSERT_TRUE(step_is_right(session, captured, table));
  workspace_->invalidate_runtime_cache();
  ASSERT_TRUE(step_is_right(session, captured, table));
  EXPECT_EQ(session.stats().plans, 1U);
  workspace_->invalidate_verify_runtime_cache();
  ASSERT_TRUE(step_is_right(session, captured, table));
  EXPECT_EQ(session.stats().plans, 2U);
}

TEST_P(Graph, WhatTheSessionWasNotMadeForIsNamed) {
  Captured captured(GetParam(), decode_case(), rng_);
  GraphOptions options = captured.options(10);
  options.num_pages = captured.num_pages() - 1;
  GraphSession session = capture(captured, options);
  const auto table = [&](std::vector<std::vector<std::int32_t>> pages, std::int32_t page_size = 16) {
    std::vector<std::int32_t> lens;
    for (const auto& list : pages) lens.push_back(static_cast<std::int32_t>(list.size()) * page_size);
    return PageTable::from_pages(page_size, captured.num_pages(), pages, lens);
  };
  const PageTable good = table({{0, 1}, {2}});
  ASSERT_TRUE(step_is_right(session, captured, good));
  const auto refused = [&](const PageTable& bad, const std::string& part) {
    expect_error(Status::kInvalidArgument, part, [&] { session.step(bad, stream_.get()); });
  };
  refused(table(std::vector<std::vector<std::int32_t>>(9, {0})), "9 requests, the session was made for max_batch = 8");
  refused(table({std::vector<std::int32_t>(11, 0)}), "11 pages, the session was made for max_pages = 10");
  const auto last = static_cast<std::int32_t>(captured.num_pages()) - 1;
  refused(table({{last}}), "names page " + std::to_string(last));
  refused(table({{0}}, 8), "page_size is 8, the session's 16");
  expect_error(Status::kInvalidArgument, "not the one prepared last", [&] { session.replay(8, stream_.get()); });
  expect_error(Status::kInvalidArgument, "no step was begun", [&] { captured.run(session); });
  ASSERT_TRUE(step_is_right(session, captured, good));
}

TEST_P(Graph, BadOptionsAreNamed) {
  Captured captured(GetParam(), decode_case(), rng_);
  const GraphOptions good = captured.options(10);
  const auto refused = [&](const std::string& part, auto change) {
    GraphOptions options = good;
    change(options);
    expect_error(Status::kInvalidArgument, part, [&] { session_for(captured, options); });
  };
  refused("max_batch is 0", [](GraphOptions& o) { o.max_batch = 0; });
  refused("max_batch is 2147483647", [](GraphOptions& o) { o.max_batch = 2147483647; });
  refused("max_pages is -1", [](GraphOptions& o) { o.max_pages = -1; });
  refused("32 bits do not number so many slots", [](GraphOptions& o) { o.max_pages = 2147483647; });
  refused("page_size is 0", [](GraphOptions& o) { o.page_size = 0; });
  refused("num_pages is 0", [](GraphOptions& o) { o.num_pages = 0; });
  refused("buckets hold 2 after 4", [](GraphOptions& o) { o.buckets = {4, 2, 8}; });
  refused("the last of buckets is 4", [](GraphOptions& o) { o.buckets = {4}; });
  refused("live_table.indptr has 0 entries, expected 9", [](GraphOptions& o) { o.live_table.emplace(); });
  expect_error(Status::kInvalidArgument, "kinds is empty", [&] { GraphSession::decode(*workspace_, {}, good); });
  const StepSpec spec = captured.spec();
  for (const std::int32_t window : {0, 4097}) {
    expect_error(Status::kInvalidArgument, "window is " + std::to_string(window), [&] {
      GraphSession::verify(*workspace_, window, {&spec, 1}, good);
    });
  }
}

TEST_P(Graph, BadLayersEndTheCapture) {
  Captured captured(GetParam(), decode_case(), rng_);
  GraphSession session = session_for(captured, captured.options(most_pages(captured.problem().description())));
  Problem& problem = captured.problem();
  const auto refused = [&](Status status, const std::string& part, std::function<void(std::int32_t)> body) {
    expect_error(status, part, [&] { session.capture(std::move(body), stream_.get()); });
  };
  refused(Status::kInvalidArgument, "body is empty", {});
  refused(Status::kInvalidArgument, "kind is 1", [&](std::int32_t) { captured.run(session, 1); });
  refused(Status::kInvalidArgument, "q has 1 rows, expected 2", [&](std::int32_t) {
    ConstTensor q = problem.q().device();
    q.rows = 1;
    session.run(q, problem.cache().device(), problem.out().device());
  });
  refused(Status::kInvalidArgument, "within capture()",
          [&](std::int32_t) { session.capture([](std::int32_t) {}, stream_.get()); });
  EXPECT_THROW(session.capture([](std::int32_t) { throw std::logic_error("the caller's own"); }, stream_.get()),
               std::logic_error);
  expect_error(Status::kInvalidArgument, "nothing was captured",
               [&] { session.step(captured.random_table(1, 10), stream_.get()); });
  session.capture([&](std::int32_t) { captured.run(session); }, stream_.get());
  EXPECT_TRUE(step_is_right(session, captured, captured.random_table(5, kMaxLen)));
}

TEST_P(Graph, OutlivesTheWorkspaceAndTheOtherWayRound) {
  Captured captured(GetParam(), decode_case(), rng_);
  const PageTable table = captured.random_table(4, kMaxLen);
  {
    GraphSession session = capture(captured);
    ASSERT_TRUE(step_is_right(session, captured, table));
  }
  captured.problem().call(*workspace_);
  GraphSession session = capture(captured);
  ASSERT_TRUE(step_is_right(session, captured, table));
  workspace_->close();
  expect_error(Status::kClosed, "closed", [&] { session.step(table, stream_.get()); });
  expect_error(Status::kClosed, "closed", [&] { session.capture([](std::int32_t) {}, stream_.get()); });
  workspace_.reset();
  expect_error(Status::kClosed, "closed", [&] { session.check(stream_.get()); });
}

TEST_P(Graph, AppendsTheStepsTokens) {
  for (const std::int32_t window : {1, 4}) {
    Case c = window == 1 ? decode_case() : verify_case(window);
    Captured captured(GetParam(), c, rng_);
    GraphSession session = session_for(captured, captured.options(most_pages(c)));
    const CacheShape& shape = captured.problem().cache().shape();
    const std::int64_t rows = std::int64_t{kMaxBatch} * window;
    TestTensor k(GetParam(), DType::kBFloat16, rows, shape.num_kv_heads, shape.head_dim_qk, Spacing::kContiguous);
    TestTensor v(GetParam(), DType::kBFloat16, rows, shape.num_kv_heads, shape.head_dim_vo, Spacing::kContiguous);
    session.capture(
        [&](std::int32_t) {
          session.append_kv(k.device(), v.device(), captured.problem().cache().device());
          captured.run(session);
        },
        stream_.get());
    for (int i = 0; i < 5; ++i) {
      k.fill_normal(rng_);
      v.fill_normal(rng_);
      // Every request its own pages: two that append to one page would race.
      std::vector<std::vector<std::int32_t>> pages;
      std::vector<std::int32_t> lens;
      const auto batch = static_cast<std::size_t>(rng_.uniform(1, kMaxBatch));
      for (std::size_t r = 0; r < batch; ++r) {
        lens.push_back(rng_.uniform(0, 4 * c.page_size));
        pages.emplace_back();
        for (std::int32_t p = 0; p < 4; ++p) pages[r].push_back(static_cast<std::int32_t>(r) * 4 + p);
      }
      const PageTable table = PageTable::from_pages(c.page_size, captured.num_pages(), pages, lens);
      for (std::size_t r = 0; r < batch; ++r) {
        for (std::int32_t p = 0; p < window; ++p) {
          const std::int32_t position = lens[r] - window + p;
          if (position < 0) continue;
          captured.problem().cache().store_token(pages[r][static_cast<std::size_t>(position / c.page_size)],
                                                 position % c.page_size, k, v,
                                                 static_cast<std::int64_t>(r) * window + p);
        }
      }
      ASSERT_TRUE(step_is_right(session, captured, table));
      ASSERT_TRUE(captured.problem().cache().device_matches_host());
    }
  }
}

class LiveGraph : public Graph {
 protected:
  void start(const Case& c, bool plan_on_device) {
    captured_.emplace(GetParam(), c, rng_);
    GraphOptions options = captured_->options(most_pages(c));
    arrays_.emplace(GetParam(), options.max_batch, options.max_pages);
    arrays_->put(PageTable::from_pages(c.page_size, captured_->num_pages(), {}, {}));
    options.live_table = arrays_->view(options.page_size, options.num_pages);
    options.plan_on_device = plan_on_device;
    session_.emplace(capture(*captured_, options));
    current_ = &*session_;
  }
  testing::AssertionResult replay_is_right(const PageTable& table) {
    captured_->problem().poison_outputs();
    arrays_->put(table);
    session_->replay(table.batch(), stream_.get());
    session_->check(stream_.get());
    return captured_->check(table, bucket_of(*session_, table.batch()));
  }
  /// Replays what the arrays hold now; the error must name `request`.
  void expect_stale(std::int32_t batch, std::int64_t request, const std::string& part) {
    session_->replay(batch, stream_.get());
    try {
      session_->check(stream_.get());
      ADD_FAILURE() << "a replay went unnoticed; expected \"" << part << "\"";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kStalePlan) << error.what();
      EXPECT_EQ(error.index(), request) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }

  std::optional<Captured> captured_;
  std::optional<LiveArrays> arrays_;
  std::optional<GraphSession> session_;
};

TEST_P(LiveGraph, ReplaysFollowTheTableInPlace) {
  for (const Case& c : {decode_case(), decode_case(4, 4), verify_case(5), verify_case(75)}) {
    start(c, true);
    for (int i = 0; i < 25; ++i) {
      ASSERT_TRUE(replay_is_right(captured_->random_table(rng_.uniform(1, kMaxBatch), rng_.uniform(1, kMaxLen))));
    }
    EXPECT_EQ(session_->stats().trips, 0U);
    expect_error(Status::kInvalidArgument, "call replay()",
                 [&] { session_->step(captured_->random_table(1, 9), stream_.get()); });
  }
}

TEST_P(LiveGraph, BadTablesFailClosedAndGoodOnesServeAgain) {
  start(decode_case(), true);
  const PageTable good = captured_->random_table(kMaxBatch, kMaxLen);
  const auto spoil = [&](std::int64_t request, const std::string& part, auto change) {
    arrays_->put(good);
    change(*arrays_);
    arrays_->upload();
    expect_stale(kMaxBatch, request, part);
    ASSERT_TRUE(replay_is_right(good)) << part;
  };
  spoil(0, "indptr[0] is 1, expected 0", [](LiveArrays& a) { a.indptr.host()[0] = 1; });
  spoil(4, "below", [](LiveArrays& a) { a.indptr.host()[5] = -7; });
  spoil(7, "max_pages", [](LiveArrays& a) { a.indptr.host()[8] = 1 << 30; });
  std::int32_t owner = 0;
  while (good.page_counts()[static_cast<std::size_t>(owner)] == 0) ++owner;
  const auto first = static_cast<std::size_t>(good.indptr()[static_cast<std::size_t>(owner)]);
  spoil(owner, "last_page_len", [&](LiveArrays& a) { a.last_page_len.host()[static_cast<std::size_t>(owner)] = 17; });
  spoil(owner, "owns page -1", [&](LiveArrays& a) { a.indices.host()[first] = -1; });
  spoil(owner, "owns page " + std::to_string(captured_->num_pages()),
        [&](LiveArrays& a) { a.indices.host()[first] = static_cast<std::int32_t>(captured_->num_pages()); });
  EXPECT_EQ(session_->stats().trips, 6U);
}

TEST_P(LiveGraph, WithoutDevicePlanningAStalePlanDoesNoWork) {
  start(decode_case(), false);
  PageTable table = captured_->random_table(3, 100);
  arrays_->put(table);
  ASSERT_EQ(session_->prepare(table, stream_.get()), 4);
  ASSERT_TRUE(replay_is_right(table));
  for (int i = 0; i < 40; ++i) {
    std::vector<std::int32_t> fresh(static_cast<std::size_t>(table.pages_needed(1)));
    const bool gains = !fresh.empty();
    std::int64_t first = -1;
    const PageTable before = table;
    table.advance(1, fresh);
    for (std::size_t r = 3; r-- > 0;) {
      if (before.page_counts()[r] != table.page_counts()[r]) first = static_cast<std::int64_t>(r);
    }
    arrays_->put(table);
    if (gains) {
      captured_->problem().poison_outputs();
      expect_stale(3, first, "the plan was made for");
      session_->prepare(table, stream_.get());
    }
    ASSERT_TRUE(replay_is_right(table));
  }
  EXPECT_GT(session_->stats().trips, 0U);
}

// The page that a bad table names is one of the cache all the same, so that a write to it would show.
TEST_P(LiveGraph, NothingIsAppendedToTheMistakenPagesOfABadTable) {
  for (const bool plan_on_device : {true, false}) {
    const Case c = verify_case(3);
    captured_.emplace(GetParam(), c, rng_);
    GraphOptions options = captured_->options(most_pages(c));
    options.num_pages = captured_->num_pages() - 1;
    arrays_.emplace(GetParam(), options.max_batch, options.max_pages);
    options.live_table = arrays_->view(options.page_size, options.num_pages);
    options.plan_on_device = plan_on_device;
    session_.emplace(session_for(*captured_, options));
    PagedCache& cache = captured_->problem().cache();
    const std::int64_t rows = std::int64_t{kMaxBatch} * 3;
    TestTensor k(GetParam(), DType::kBFloat16, rows, cache.shape().num_kv_heads, cache.shape().head_dim_qk,
                 Spacing::kContiguous);
    TestTensor v(GetParam(), DType::kBFloat16, rows, cache.shape().num_kv_heads, cache.shape().head_dim_vo,
                 Spacing::kContiguous);
    k.fill_normal(rng_);
    v.fill_normal(rng_);
    session_->capture(
        [&](std::int32_t) {
          session_->append_kv(k.device(), v.device(), cache.device());
          captured_->run(*session_);
        },
        capturing(*session_));
    const auto outside = static_cast<std::int32_t>(options.num_pages);
    const std::vector<std::vector<std::int32_t>> pages{{1}, {outside}};
    const std::vector<std::int32_t> lens{7, 9};
    const PageTable table = PageTable::from_pages(c.page_size, captured_->num_pages(), pages, lens);
    if (!plan_on_device) {
      const std::vector<std::vector<std::int32_t>> within{{1}, {2}};
      session_->prepare(PageTable::from_pages(c.page_size, options.num_pages, within, lens), stream_.get());
    }
    arrays_->put(table);
    expect_stale(2, 1, "request 1 owns page " + std::to_string(outside));
    EXPECT_TRUE(cache.device_matches_host());
  }
}

TEST_P(LiveGraph, APreparedPlanServesItsOwnBucketOnly) {
  start(decode_case(), false);
  const PageTable table = captured_->random_table(3, 100);
  arrays_->put(table);
  expect_error(Status::kInvalidArgument, "not the one prepared last", [&] { session_->replay(3, stream_.get()); });
  session_->prepare(table, stream_.get());
  for (const std::int32_t batch : {1, 2, 5, 8}) {
    expect_error(Status::kInvalidArgument, "not the one prepared last",
                 [&] { session_->replay(batch, stream_.get()); });
  }
  EXPECT_TRUE(replay_is_right(table));
  EXPECT_EQ(session_->stats().trips, 0U);
}

INSTANTIATE_TEST_SUITE_P(Devices, Graph, testing::ValuesIn(compiled_devices()), device_test_name);
INSTANTIATE_TEST_SUITE_P(Devices, LiveGraph, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
