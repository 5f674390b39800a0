// The scheduler over random traces: every token once, in order, on pages of its own, within every limit, with nothing
// left.
#include "scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "fiw/error.h"
#include "seed.h"

namespace fiw::cli {
namespace {

TraceRequest request(std::int32_t prompt, std::int32_t output, std::vector<std::uint64_t> hashes = {}) {
  return {0, prompt, output, std::move(hashes)};
}

SchedulerOptions small(std::int32_t pages, std::int32_t batch, std::int32_t budget) {
  SchedulerOptions options;
  options.num_pages = pages;
  options.max_batch = batch;
  options.token_budget = budget;
  return options;
}

TEST(Scheduler, ChunksThenDecodes) {
  const std::vector<TraceRequest> trace = {request(40, 3)};
  Scheduler scheduler(trace, small(10, 4, 16));
  ScheduledStep step;
  for (const auto& [start, count] : std::vector<std::pair<int, int>>{{0, 16}, {16, 16}, {32, 8}}) {
    ASSERT_TRUE(scheduler.next(step));
    ASSERT_EQ(step.prefill.size(), 1U);
    EXPECT_EQ(step.prefill[0].start, start);
    EXPECT_EQ(step.prefill[0].count, count);
    EXPECT_TRUE(step.decode.empty());
    scheduler.finish(step);
  }
  EXPECT_EQ(scheduler.state(0).generated, 1);
  for (int token = 1; token < 3; ++token) {
    ASSERT_TRUE(scheduler.next(step));
    EXPECT_TRUE(step.prefill.empty());
    EXPECT_EQ(step.decode, (std::vector<std::int32_t>{0}));
    EXPECT_EQ(scheduler.state(0).kv_len, 40 + token);
    scheduler.finish(step);
  }
  EXPECT_FALSE(scheduler.next(step));
  EXPECT_EQ(scheduler.totals().generated_tokens, 3);
  EXPECT_EQ(scheduler.pool().used(), 0);
}

TEST(Scheduler, DecodesFirstAndPrefillsWithTheRest) {
  const std::vector<TraceRequest> trace = {request(4, 9), request(100, 1)};
  Scheduler scheduler(trace, small(20, 2, 10));
  ScheduledStep step;
  ASSERT_TRUE(scheduler.next(step));  // the whole first prompt and a piece of the second
  ASSERT_EQ(step.prefill.size(), 2U);
  EXPECT_EQ(step.prefill[1].count, 6);
  scheduler.finish(step);
  ASSERT_TRUE(scheduler.next(step));
  EXPECT_EQ(step.decode.size(), 1U);
  ASSERT_EQ(step.prefill.size(), 1U);
  EXPECT_EQ(step.prefill[0].count, 9);
}

TEST(Scheduler, SharesFullBlocksOfEqualPrefixes) {
  const std::vector<std::uint64_t> abc = {1, 2, 3};
  const std::vector<TraceRequest> trace = {request(1300, 2, abc), request(1300, 2, abc), request(1300, 2, {1, 9, 3}),
                                           request(1024, 2, {1, 2}), request(1300, 2, {2, 1, 3})};
  SchedulerOptions options = small(1000, 1, 2000);  // one after the other
  Scheduler scheduler(trace, options);
  ScheduledStep step;
  std::map<std::int32_t, std::vector<std::int32_t>> pages;
  while (scheduler.next(step)) {
    for (const PrefillChunk& chunk : step.prefill) pages[chunk.request] = scheduler.state(chunk.request).pages;
    scheduler.finish(step);
  }
  EXPECT_EQ(scheduler.state(0).shared_tokens, 0);
  EXPECT_EQ(scheduler.state(1).shared_tokens, 1024);  // the third block is not full
  EXPECT_EQ(scheduler.state(2).shared_tokens, 512);   // they part after the first block
  EXPECT_EQ(scheduler.state(3).shared_tokens, 1008);  // its last token must still be computed
  EXPECT_EQ(scheduler.state(4).shared_tokens, 0);     // the same hashes in another order
  for (std::size_t page = 0; page < 64; ++page) EXPECT_EQ(pages[0][page], pages[1][page]);
  EXPECT_EQ(scheduler.totals().shared_pages, 64 + 32 + 63);
}

TEST(Scheduler, RejectsOnlyWhatCanNeverFit) {
  const std::vector<TraceRequest> trace = {request(160, 1), request(160, 2), request(159, 2), request(1, 1000)};
  Scheduler scheduler(trace, small(10, 4, 64));
  EXPECT_THAT(scheduler.rejected(), testing::ElementsAre(1, 3));
  ScheduledStep step;
  while (scheduler.next(step)) scheduler.finish(step);
  EXPECT_EQ(scheduler.totals().finished, 2);
  EXPECT_EQ(scheduler.pool().peak_used(), 10);
}

TEST(Scheduler, RollsRejectedDraftsBack) {
  const std::vector<TraceRequest> trace = {request(15, 20)};
  SchedulerOptions options = small(8, 1, 16);
  options.speculate = 3;
  options.acceptance = 0.0;
  Scheduler scheduler(trace, options);
  ScheduledStep step;
  ASSERT_TRUE(scheduler.next(step));
  scheduler.finish(step);
  for (int token = 1; token < 20; ++token) {
    ASSERT_TRUE(scheduler.next(step));
    EXPECT_EQ(step.window, 4);
    EXPECT_EQ(scheduler.state(0).kv_len, 15 + token - 1 + 4);
    EXPECT_EQ(scheduler.state(0).pages.size(), static_cast<std::size_t>((15 + token + 3 + 15) / 16));
    scheduler.finish(step);
    if (token == 19) break;  // finished: its state is gone
    EXPECT_EQ(scheduler.state(0).kv_len, 15 + token);
    EXPECT_EQ(scheduler.state(0).pages.size(), static_cast<std::size_t>((15 + token + 15) / 16));
    EXPECT_EQ(scheduler.state(0).generated, 1 + token);
    EXPECT_EQ(scheduler.state(0).written_in_step.back(), token);
  }
  EXPECT_FALSE(scheduler.next(step));
  EXPECT_EQ(scheduler.totals().accepted_tokens, 0);
}

TEST(Scheduler, AcceptsEveryDraftWhenCertain) {
  const std::vector<TraceRequest> trace = {request(5, 11)};
  SchedulerOptions options = small(8, 1, 16);
  options.speculate = 4;
  options.acceptance = 1.0;
  Scheduler scheduler(trace, options);
  ScheduledStep step;
  std::vector<std::int32_t> generated;
  while (scheduler.next(step)) {
    scheduler.finish(step);
    generated.push_back(scheduler.state(0).generated);
  }
  EXPECT_EQ(generated, (std::vector<std::int32_t>{1, 6, 11}));
}

TEST(Scheduler, RefusesOptionsThatMakeNoSense) {
  const std::vector<TraceRequest> trace = {request(5, 1)};
  const auto message = [&](const SchedulerOptions& options) -> std::string {
    try {
      Scheduler scheduler(trace, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.reason(), Reason::kOptions);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message(small(0, 1, 16)), testing::HasSubstr("pages is 0, expected at least 1"));
  EXPECT_THAT(message(small(1, 0, 16)), testing::HasSubstr("max batch is 0"));
  EXPECT_THAT(message(small(1, 32, 31)), testing::HasSubstr("token budget is 31, expected at least 32"));
  SchedulerOptions options = small(1, 1, 16);
  options.acceptance = 1.5;
  EXPECT_THAT(message(options), testing::HasSubstr("acceptance is 1.5"));
  options = small(1, 1, 16);
  options.speculate = 64;
  EXPECT_THAT(message(options), testing::HasSubstr("speculate is 64"));
  options = small(1, 1, 16);
  options.page_size = 0;
  EXPECT_THAT(message(options), testing::HasSubstr("page size is 0"));
}

class SchedulerFuzz : public SeededTest {
 protected:
  std::vector<TraceRequest> random_trace() {
    std::vector<TraceRequest> trace;
    const std::int32_t size = between(1, 40);
    for (std::int32_t i = 0; i < size; ++i) {
      TraceRequest r = request(between(1, between(0, 3) == 0 ? 3000 : 200), between(0, 60));
      if (between(0, 2) > 0) {
        for (std::int32_t at = 0; at < r.prompt_tokens; at += kHashBlockTokens) {
          r.block_hashes.push_back(static_cast<std::uint64_t>(between(0, 2)));
        }
      }
      trace.push_back(std::move(r));
    }
    return trace;
  }

  SchedulerOptions random_options() {
    SchedulerOptions options;
    options.page_size = between(1, 3) == 1 ? between(1, 70) : 16;
    options.num_pages = between(1, 6000 / options.page_size + 1);
    options.max_batch = between(1, 12);
    options.speculate = between(0, 1) * between(0, 5);
    options.token_budget = options.max_batch * (options.speculate + 1) + between(0, 300);
    options.acceptance = between(0, 10) / 10.0;
    options.seed = random_();
    return options;
  }
};

TEST_F(SchedulerFuzz, EveryTokenOnceOnItsOwnPages) {
  for (int round = 0; round < 60; ++round) {
    const std::vector<TraceRequest> trace = random_trace();
    const SchedulerOptions options = random_options();
    Scheduler scheduler(trace, options);
    const std::set<std::int32_t> rejected(scheduler.rejected().begin(), scheduler.rejected().end());
    // What each cache slot holds, as the tokens' identities: (prefix or request, position, step).
    using Token = std::tuple<std::int64_t, std::int32_t, std::int64_t>;
    std::vector<Token> slots(static_cast<std::size_t>(options.num_pages) * options.page_size);
    const auto token_at = [&](std::int32_t r, std::int32_t position) -> Token {
      const RequestState& state = scheduler.state(r);
      if (position >= trace[r].prompt_tokens) {
        return {-1 - r, position, state.written_in_step[position - trace[r].prompt_tokens]};
      }
      const auto block = static_cast<std::size_t>(position / kHashBlockTokens);
      return {block < state.prefixes.size() ? state.prefixes[block] : -1 - r, position, -1};
    };
    std::vector<std::int32_t> prefilled(trace.size());  // the next position to prefill; set at the first chunk
    std::vector<bool> started(trace.size());
    std::vector<std::int32_t> generated(trace.size());
    ScheduledStep step;
    std::int64_t steps = 0;
    while (scheduler.next(step)) {
      ASSERT_EQ(step.index, steps++);
      std::int32_t tokens = 0;
      const auto write = [&](std::int32_t r, std::int32_t start, std::int32_t count) {
        const RequestState& state = scheduler.state(r);
        ASSERT_EQ(state.kv_len, start + count);
        ASSERT_EQ(state.pages.size(),
                  static_cast<std::size_t>((state.kv_len + options.page_size - 1) / options.page_size));
        tokens += count;
        for (std::int32_t p = start; p < start + count; ++p) {
          const std::int32_t page = state.pages[p / options.page_size];
          ASSERT_EQ(scheduler.pool().references(page), 1) << "written while shared";
          slots[page * options.page_size + p % options.page_size] = token_at(r, p);
        }
      };
      for (const PrefillChunk& chunk : step.prefill) {
        const std::int32_t r = chunk.request;
        ASSERT_FALSE(rejected.contains(r));
        ASSERT_EQ(chunk.start, started[r] ? prefilled[r] : scheduler.state(r).shared_tokens);
        ASSERT_GE(chunk.count, 1);
        started[r] = true;
        prefilled[r] = chunk.start + chunk.count;
        write(r, chunk.start, chunk.count);
      }
      for (const std::int32_t r : step.decode) {
        ASSERT_EQ(prefilled[r], trace[r].prompt_tokens);
        write(r, trace[r].prompt_tokens + generated[r] - 1, step.window);
      }
      ASSERT_GE(tokens, 1);
      ASSERT_LE(tokens, options.token_budget);
      ASSERT_LE(scheduler.running(), options.max_batch);
      ASSERT_LE(scheduler.pool().used(), options.num_pages);
      // Every slot that a request of this step reads holds the token that the request means.
      const auto read_back = [&](std::int32_t r) {
        const RequestState& state = scheduler.state(r);
        for (std::int32_t p = 0; p < state.kv_len; ++p) {
          const std::int32_t slot = state.pages[p / options.page_size] * options.page_size + p % options.page_size;
          ASSERT_EQ(slots[slot], token_at(r, p)) << "request " << r << ", position " << p;
        }
      };
      for (const PrefillChunk& chunk : step.prefill) read_back(chunk.request);
      for (const std::int32_t r : step.decode) read_back(r);
      if (HasFatalFailure()) return;

      scheduler.finish(step);
      for (const PrefillChunk& chunk : step.prefill) {
        if (prefilled[chunk.request] == trace[chunk.request].prompt_tokens && trace[chunk.request].output_tokens > 0) {
          generated[chunk.request] = 1;
        }
        ASSERT_EQ(scheduler.state(chunk.request).generated, generated[chunk.request]);
      }
      for (const std::int32_t r : step.decode) {
        const std::int32_t gained = scheduler.state(r).generated - generated[r];
        ASSERT_GE(gained, 1);
        ASSERT_LE(gained, step.window);
        generated[r] += gained;
      }
    }
    ASSERT_EQ(scheduler.running(), 0);
    ASSERT_EQ(scheduler.pool().used(), 0) << "pages leaked";
    std::int64_t served = 0;
    for (std::int32_t r = 0; r < static_cast<std::int32_t>(trace.size()); ++r) {
      if (rejected.contains(r)) {
        ASSERT_GT(scheduler.worst_case_pages(trace[r]), options.num_pages);
        continue;
      }
      ++served;
      ASSERT_EQ(prefilled[r], trace[r].prompt_tokens);
      ASSERT_EQ(generated[r], trace[r].output_tokens);
    }
    ASSERT_EQ(scheduler.totals().finished, served);
    ASSERT_EQ(scheduler.totals().steps, steps);
  }
}

TEST_F(SchedulerFuzz, SameInputSameSchedule) {
  const std::vector<TraceRequest> trace = random_trace();
  const SchedulerOptions options = random_options();
  Scheduler a(trace, options);
  Scheduler b(trace, options);
  ScheduledStep step_a;
  ScheduledStep step_b;
  while (a.next(step_a)) {
    ASSERT_TRUE(b.next(step_b));
    ASSERT_EQ(step_a.decode, step_b.decode);
    ASSERT_EQ(step_a.prefill.size(), step_b.prefill.size());
    for (std::size_t i = 0; i < step_a.prefill.size(); ++i) {
      ASSERT_EQ(step_a.prefill[i].request, step_b.prefill[i].request);
      ASSERT_EQ(a.state(step_a.prefill[i].request).pages, b.state(step_b.prefill[i].request).pages);
    }
    a.finish(step_a);
    b.finish(step_b);
  }
  EXPECT_FALSE(b.next(step_b));
}

}  // namespace
}  // namespace fiw::cli
