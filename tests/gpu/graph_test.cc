// What only CUDA graphs can get wrong: plans made by the device, captures of the caller's own, work still in flight.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/graph_backend.h"
#include "gate.h"
#include "plan/device_plan.h"
#include "support/captured.h"
#include "support/live_arrays.h"
#include "support/schedule_view.h"

namespace fiw::test {
namespace {

constexpr int kDevice = 0;

class CudaGraph : public testing::Test, public Seeded {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "skipped: no CUDA device";
    stream_ = std::make_unique<TestStream>(kDevice);
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_->get()); }
  void synchronize() const { ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess); }

  static Case decode_case(std::int32_t batch) {
    return {.op = Op::kDecode,
            .params = {.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 128},
            .qo_lens = std::vector<std::int32_t>(static_cast<std::size_t>(batch), 1),
            .kv_lens = std::vector<std::int32_t>(static_cast<std::size_t>(batch), 300)};
  }

  std::unique_ptr<TestStream> stream_;
};

TEST_F(CudaGraph, TheDevicePlansAsTheHostDoes) {
  const std::unique_ptr<Backend> backend = make_cuda_backend(kDevice, {});
  GraphBackend& graphs = *backend->graphs();
  const std::shared_ptr<GraphAlarm> alarm = graphs.make_alarm();
  const DeviceProps& device = backend->props();
  for (int round = 0; round < 400; ++round) {
    const std::int32_t batch = rng_.pick({1, 2, 7, 64, 65, 200, 700, 1024});
    const std::int32_t heads = rng_.pick({1, 2, 8});
    WorkLoad work{.num_qo_heads = heads * rng_.pick({1, 3, 4, 8}),
                  .num_kv_heads = heads,
                  .head_dim_qk = 128,
                  .head_dim_vo = 128,
                  .page_size = rng_.pick({1, 16, 64}),
                  .window_left = rng_.chance(0.3) ? rng_.uniform(0, 3000) : -1,
                  .causal = rng_.chance(0.8),
                  .uniform_qo_len = rng_.pick({1, 1, 2, 5, 16, rng_.uniform(17, 300), rng_.uniform(300, 4096)})};
    const bool ungrouped = work.num_qo_heads == work.num_kv_heads && work.uniform_qo_len == 1;
    KernelFamily family = ungrouped ? KernelFamily::kCudaCore : KernelFamily::kTensorTile;
    if (work.group_size() * work.uniform_qo_len <= kCudaStreamRows && rng_.chance(0.5)) {
      family = KernelFamily::kCudaStream;
    }
    std::vector<std::int32_t> counts;
    const std::int32_t most = std::max(1, rng_.pick({40, 4000, 60000}) / work.page_size);
    for (std::int32_t r = 0; r < batch; ++r) counts.push_back(rng_.chance(0.2) ? 0 : rng_.uniform(1, most));
    if (rng_.chance(0.3)) counts[0] = 100000 / work.page_size + 1;
    work.kv_pages = counts;
    std::vector<std::int32_t> indptr{0};
    for (const std::int32_t count : counts) indptr.push_back(indptr.back() + count);
    SplitPolicy policy{.fixed_chunk_tokens = rng_.chance(0.2) ? rng_.pick({100, 1000}) : 0,
                       .graph = true,
                       .max_batch = batch,
                       .max_pages = indptr.back() + 5};
    std::optional<Planned> made;
    try {
      made.emplace(family, device, work, policy);
    } catch (const Error& error) {
      ASSERT_EQ(error.reason(), Reason::kSizeOverflow) << error.what();  // partial outputs beyond 32-bit offsets
      continue;
    }
    const Planned& planned = *made;

    Mirror<std::int32_t> device_indptr(kDevice, indptr);
    Mirror<std::int32_t> indices(kDevice, std::vector<std::int32_t>(static_cast<std::size_t>(indptr.back()) + 1, 0));
    Mirror<std::int32_t> last(kDevice, std::vector<std::int32_t>(counts.size(), work.page_size));
    Mirror<std::int32_t> kv_lens(kDevice, counts.size());
    Mirror<std::byte> schedule(kDevice, std::vector<std::byte>(planned.shape.bytes, std::byte{0xFF}));
    const ReplanLaunch::Part part{.shape = &planned.shape,
                                  .plan = device_plan(planned.shape, device, work, policy),
                                  .schedule = schedule.device()};
    graphs.replan(
        {.parts = {&part, 1},
         .table = {.indptr = device_indptr.device(), .indices = indices.device(), .last_page_len = last.device()},
         .kv_lens = kv_lens.device(),
         .batch = batch,
         .page_size = work.page_size,
         .num_pages = 1,
         .max_pages = policy.max_pages,
         .alarm = alarm.get(),
         .stream = stream()});
    synchronize();
    schedule.download();
    kv_lens.download();
    Planned actual = planned;
    std::memcpy(actual.memory.data(), schedule.host().data(), planned.shape.bytes);
    SCOPED_TRACE("round " + std::to_string(round) + ", batch " + std::to_string(batch) + ", window " +
                 std::to_string(work.window_left) + ", page size " + std::to_string(work.page_size) + ", tokens " +
                 std::to_string(work.uniform_qo_len));
    ASSERT_EQ(alarm->trips, 0U);
    const auto same = [](auto a, auto b) { return std::ranges::equal(a, b); };
    EXPECT_EQ(actual.kv_chunk(), planned.kv_chunk());
    EXPECT_EQ(actual.total_num_rows(), planned.total_num_rows());
    EXPECT_TRUE(same(actual.requests(), planned.requests()));
    EXPECT_TRUE(same(actual.qo_tiles(), planned.qo_tiles()));
    EXPECT_TRUE(same(actual.kv_tiles(), planned.kv_tiles()));
    EXPECT_TRUE(same(actual.o_indptr(), planned.o_indptr()));
    EXPECT_TRUE(same(actual.merge_indptr(), planned.merge_indptr()));
    EXPECT_TRUE(same(actual.arrivals(), planned.arrivals()));
    EXPECT_TRUE(same(actual.mask(), planned.mask()));
    for (std::size_t r = 0; r < counts.size(); ++r) {
      EXPECT_EQ(kv_lens.host()[r], counts[r] * work.page_size) << "request " << r;
    }
    if (HasFailure()) return;
  }
}

TEST_F(CudaGraph, ACaptureOfTheCallersOwn) {
  Captured captured(kDevice, decode_case(8), rng_);
  const auto workspace = make_workspace(kDevice);
  const StepSpec spec = captured.spec();
  GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, captured.options(8 * 44));
  std::vector<std::pair<std::int32_t, cudaGraphExec_t>> graphs;
  for (const std::int32_t bucket : session.buckets()) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    // As PyTorch captures: without leave for what a kernel's first launch does.
    ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
    ASSERT_EQ(session.begin(bucket, stream()), bucket);
    session.run(captured.problem().q().device(), captured.problem().cache().device(), captured.problem().out().device(),
                captured.problem().device_lse(), {}, stream());
    ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
    graphs.emplace_back(bucket, executable);
  }
  for (int i = 0; i < 40; ++i) {
    const PageTable table = captured.random_table(rng_.uniform(0, 8), 700);
    captured.problem().poison_outputs();
    const std::int32_t bucket = session.prepare(table, stream());
    for (const auto& [batch, executable] : graphs) {
      if (batch == bucket) {
        ASSERT_EQ(cudaGraphLaunch(executable, stream()), cudaSuccess);
      }
    }
    session.check(stream());
    ASSERT_TRUE(captured.check(table, bucket));
  }
  for (const auto& [batch, executable] : graphs) cudaGraphExecDestroy(executable);
}

// The library does not see replays of the caller's graphs: only streams order them with what prepare() writes.
TEST_F(CudaGraph, PreparingIsOrderedWithReplaysOfTheCallersOwn) {
  Captured captured(kDevice, decode_case(8), rng_);
  Problem other(kDevice, decode_case(8), rng_);
  const TestStream elsewhere(kDevice);
  const auto workspace = make_workspace(kDevice);
  const StepSpec spec = captured.spec();
  GraphOptions options = captured.options(8 * 44);
  options.buckets = {8};
  GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, options);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  session.begin(8, stream());
  session.run(captured.problem().q().device(), captured.problem().cache().device(), captured.problem().out().device(),
              captured.problem().device_lse(), {}, stream());
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  cudaGraphDestroy(graph);

  other.call(*workspace);  // loads its kernel, which may wait for all streams

  cudaStream_t const streams[] = {nullptr, stream()};
  for (cudaStream_t const on : streams) {
    SCOPED_TRACE(on == nullptr ? "the default stream" : "a stream of the caller's");
    const auto replay = [&] { ASSERT_EQ(cudaGraphLaunch(executable, on), cudaSuccess); };
    const auto is_right = [&](const PageTable& table) {
      EXPECT_EQ(cudaStreamSynchronize(on), cudaSuccess);
      return captured.check(table, 8);
    };
    const PageTable first = captured.random_table(8, 700);
    const PageTable second = captured.random_table(8, 700);
    {
      // What the workspace did before, on another stream, is not done yet.
      captured.problem().poison_outputs();
      Gate gate(static_cast<cudaStream_t>(elsewhere.get()));
      workspace->decode(other.q().device(), other.cache().device(), other.table(), other.description().params,
                        other.out().device(), other.device_lse(), {}, elsewhere.get());
      session.prepare(first, on);
      replay();
      gate.release();
      EXPECT_TRUE(is_right(first)) << "the replay did not wait for its plan";
    }
    {
      // The last replay has not begun yet when the next plan is made.
      captured.problem().poison_outputs();
      Gate gate(on);
      replay();
      session.prepare(second, on);
      gate.release();
      EXPECT_TRUE(is_right(first)) << "the plan was rewritten under a replay";
    }
    {
      // The plan stands, but its upload elsewhere has not happened yet.
      captured.problem().poison_outputs();
      Gate gate(static_cast<cudaStream_t>(elsewhere.get()));
      session.prepare(first, elsewhere.get());
      session.prepare(first, on);
      replay();
      gate.release();
      EXPECT_TRUE(is_right(first)) << "the replay did not wait for a plan made on another stream";
    }
  }
  cudaGraphExecDestroy(executable);
}

// A session that plans on the device is never prepared: nothing else would order its memory before a caller's replay.
TEST_F(CudaGraph, ASessionIsReadyWhenItIsMade) {
  Captured captured(kDevice, decode_case(4), rng_);
  Problem other(kDevice, decode_case(4), rng_);
  const auto workspace = make_workspace(kDevice);
  other.call(*workspace);  // loads its kernel, which may wait for all streams
  Gate gate(stream());
  workspace->decode(other.q().device(), other.cache().device(), other.table(), other.description().params,
                    other.out().device(), other.device_lse(), {}, stream());
  std::atomic<bool> released = false;
  const std::jthread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    released = true;
    gate.release();
  });
  const StepSpec spec = captured.spec();
  const GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, captured.options(4 * 44));
  EXPECT_TRUE(released) << "made while what it waits for had not happened";
}

TEST_F(CudaGraph, AGraphOfAnotherBucketThanThePreparedOneIsStopped) {
  Captured captured(kDevice, decode_case(8), rng_);
  const auto workspace = make_workspace(kDevice);
  GraphOptions options = captured.options(8 * 44);
  options.buckets = {4, 8};
  LiveArrays arrays(kDevice, 8, options.max_pages);
  options.live_table = arrays.view(options.page_size, options.num_pages);
  options.plan_on_device = false;
  const StepSpec spec = captured.spec();
  GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, options);
  std::vector<cudaGraphExec_t> graphs(2);
  for (std::size_t i = 0; i < 2; ++i) {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeRelaxed), cudaSuccess);
    session.begin(options.buckets[i], stream());
    captured.run(session);  // on the stream that begin() was given
    ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&graphs[i], graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  for (int round = 0; round < 20; ++round) {
    const PageTable table = captured.random_table(round % 2 == 0 ? 4 : 8, 700);
    const std::size_t right = table.batch() == 4 ? 0 : 1;
    arrays.put(table);
    session.prepare(table, stream());
    ASSERT_EQ(cudaGraphLaunch(graphs[1 - right], stream()), cudaSuccess);
    try {
      session.check(stream());
      ADD_FAILURE() << "a replay of the wrong bucket went unnoticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kStalePlan) << error.what();
      EXPECT_EQ(error.index(), -1);
      EXPECT_NE(std::string(error.what()).find("the plan was made for that of"), std::string::npos) << error.what();
    }
    // What was prepared serves all the same, and again.
    for (int i = 0; i < 2; ++i) {
      captured.problem().poison_outputs();
      ASSERT_EQ(cudaGraphLaunch(graphs[right], stream()), cudaSuccess);
      session.check(stream());
      ASSERT_TRUE(captured.check(table, options.buckets[right])) << "round " << round;
    }
  }
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
}

TEST_F(CudaGraph, StepsAreRecordedInCapturesAndPreparedAndReplayedOutsideThem) {
  Captured captured(kDevice, decode_case(4), rng_);
  const auto workspace = make_workspace(kDevice);
  const StepSpec spec = captured.spec();
  GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, captured.options(4 * 44));
  const auto refused = [](const std::string& part, const auto& call) {
    try {
      call();
      ADD_FAILURE() << "accepted; expected an error with \"" << part << "\"";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused("stream is not being captured", [&] { session.begin(4, stream()); });
  session.capture([&](std::int32_t) { captured.run(session); }, stream());
  const PageTable table = captured.random_table(4, 700);
  session.step(table, stream());
  // Work on another stream, which nothing under capture may be made to wait for.
  const TestStream elsewhere(kDevice);
  Problem other(kDevice, decode_case(4), rng_);
  workspace->decode(other.q().device(), other.cache().device(), other.table(), other.description().params,
                    other.out().device(), other.device_lse(), {}, elsewhere.get());

  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeRelaxed), cudaSuccess);
  session.begin(4, stream());
  refused("stream is being captured", [&] { session.prepare(captured.random_table(4, 700), stream()); });
  refused("stream is being captured", [&] { session.prepare(table, stream()); });
  refused("stream is being captured", [&] { session.step(table, stream()); });
  refused("stream is being captured", [&] { session.replay(4, stream()); });
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  refused("stream is not being captured", [&] { captured.run(session); });

  // The step that could not be prepared left the last one in force.
  captured.problem().poison_outputs();
  session.replay(4, stream());
  session.check(stream());
  EXPECT_TRUE(captured.check(table, 4));
}

TEST_F(CudaGraph, CallsThatAGraphWouldRepeatWronglyAreRefused) {
  Captured captured(kDevice, decode_case(4), rng_);
  const auto workspace = make_workspace(kDevice);
  Problem& problem = captured.problem();
  problem.call(*workspace);
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeRelaxed), cudaSuccess);
  try {
    workspace->decode(problem.q().device(), problem.cache().device(), problem.table(), problem.description().params,
                      problem.out().device(), problem.device_lse(), {}, stream());
    ADD_FAILURE() << "a call was captured with the table of now";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("the stream is being captured"), std::string::npos) << error.what();
  }
  const DevicePageTable table{
      .page_size = 16, .num_pages = 1, .indptr = {static_cast<const std::int32_t*>(problem.out().device().data), 1}};
  EXPECT_THROW(workspace->read_table(table, stream()), Error) << "a table was read in a capture";
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess) << "a refused call broke the capture";
  cudaGraphDestroy(graph);
  problem.call(*workspace);
  EXPECT_TRUE(problem.check());
}

TEST_F(CudaGraph, AStepBelongsToTheCaptureItWasBegunIn) {
  Captured captured(kDevice, decode_case(4), rng_);
  const auto workspace = make_workspace(kDevice);
  const StepSpec spec = captured.spec();
  GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, captured.options(4 * 44));
  const auto capture = [&](auto body) {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeRelaxed), cudaSuccess);
    body();
    ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
    cudaGraphDestroy(graph);
  };
  capture([&] {
    session.begin(4, stream());
    captured.run(session);
  });
  capture([&] {
    try {
      captured.run(session);
      ADD_FAILURE() << "a step went on in another capture, without its head";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("another capture"), std::string::npos) << error.what();
    }
  });
}

TEST_F(CudaGraph, CallsBesideAnothersCaptureDoNotBreakIt) {
  const auto workspace = make_workspace(kDevice);
  Problem problem(kDevice, decode_case(4), rng_);
  const TestStream other(kDevice);
  problem.call(*workspace);
  synchronize();
  // PyTorch's mode: what might wait is forbidden to all threads.
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  std::string error;
  std::thread([&] {
    try {
      for (int i = 0; i < 20; ++i) {
        workspace->invalidate_runtime_cache();
        workspace->decode(problem.q().device(), problem.cache().device(), problem.table(), problem.description().params,
                          problem.out().device(), problem.device_lse(), {}, other.get());
      }
    } catch (const Error& e) {
      error = e.what();
    }
  }).join();
  EXPECT_EQ(error, "");
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  ASSERT_EQ(cudaStreamSynchronize(static_cast<cudaStream_t>(other.get())), cudaSuccess);
  problem.fetch_outputs();
  EXPECT_TRUE(problem.check());
}

TEST_F(CudaGraph, StepsEnqueuedBehindABusyStreamEachHaveTheirOwnPlan) {
  Captured captured(kDevice, decode_case(8), rng_);
  const auto workspace = make_workspace(kDevice);
  const StepSpec spec = captured.spec();
  GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, captured.options(8 * 44));
  session.capture([&](std::int32_t) { captured.run(session); }, stream());
  Problem& problem = captured.problem();
  const std::size_t bytes =
      static_cast<std::size_t>(problem.out().rows() * problem.out().heads() * problem.out().dim()) *
      size_of(problem.out().dtype());
  const std::size_t lse_bytes = problem.lse().size() * sizeof(float);
  problem.poison_outputs();
  std::vector<PageTable> tables;
  std::deque<DeviceBuffer> outs;
  std::deque<DeviceBuffer> lses;
  {
    const Gate gate(stream());
    for (int i = 0; i < 30; ++i) {
      tables.push_back(captured.random_table(8, 700));
      outs.emplace_back(kDevice, bytes);
      lses.emplace_back(kDevice, lse_bytes);
      session.step(tables.back(), stream());
      cudaMemcpyAsync(outs.back().data(), problem.out().device().data, bytes, cudaMemcpyDeviceToDevice, stream());
      cudaMemcpyAsync(lses.back().data(), problem.device_lse(), lse_bytes, cudaMemcpyDeviceToDevice, stream());
    }
  }
  session.check(stream());
  for (std::size_t i = 0; i < tables.size(); ++i) {
    cudaMemcpy(problem.out().device().data, outs[i].data(), bytes, cudaMemcpyDeviceToDevice);
    cudaMemcpy(problem.device_lse(), lses[i].data(), lse_bytes, cudaMemcpyDeviceToDevice);
    ASSERT_TRUE(captured.check(tables[i], 8)) << "step " << i;
  }
}

TEST_F(CudaGraph, MemoryMayStartDirty) {
  const Allocator dirty{.allocate = [](void*, std::size_t bytes, std::size_t, Stream on) -> void* {
                          void* memory = nullptr;
                          if (cudaMalloc(&memory, bytes) != cudaSuccess) return nullptr;
                          cudaMemsetAsync(memory, 0xFF, bytes, static_cast<cudaStream_t>(on));
                          return memory;
                        },
                        .free =
                            [](void*, void* memory, std::size_t, Stream on) {
                              cudaStreamSynchronize(static_cast<cudaStream_t>(on));
                              cudaFree(memory);
                            }};
  Captured captured(kDevice, decode_case(8), rng_);
  const auto workspace = make_workspace(kDevice, {.allocator = dirty});
  const StepSpec spec = captured.spec();
  GraphSession session = GraphSession::decode(*workspace, {&spec, 1}, captured.options(8 * 44));
  session.capture([&](std::int32_t) { captured.run(session); }, stream());
  for (int i = 0; i < 10; ++i) {
    const PageTable table = captured.random_table(rng_.uniform(1, 8), 700);
    captured.problem().poison_outputs();
    session.step(table, stream());
    session.check(stream());
    ASSERT_TRUE(captured.check(table, bucket_of(session, table.batch())));
  }
}

}  // namespace
}  // namespace fiw::test
