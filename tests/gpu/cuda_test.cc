// What only a CUDA device can get wrong: streams, the current device, uploads in flight, memory of the caller's, page
// tables in device memory, K and V of different strides.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gate.h"
#include "support/problem.h"
#include "support/stream.h"

namespace fiw::test {
namespace {

constexpr int kDevice = 0;

void check(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

class OwnedStream : public TestStream {
 public:
  OwnedStream() : TestStream(kDevice) {}
  cudaStream_t get() const { return static_cast<cudaStream_t>(TestStream::get()); }
  void synchronize() const { check(cudaStreamSynchronize(get())); }
};

class Cuda : public testing::Test, public Seeded {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "skipped: no CUDA device";
  }

  static Case decode(std::vector<std::int32_t> kv_lens, std::int32_t qo_heads = 8, std::int32_t kv_heads = 2) {
    return {.params = {.num_qo_heads = qo_heads, .num_kv_heads = kv_heads, .head_dim_qk = 128},
            .qo_lens = std::vector<std::int32_t>(kv_lens.size(), 1),
            .kv_lens = kv_lens};
  }
};

TEST(CudaAbsent, CreateSaysThatThereIsNoDevice) {
  if (device_count() > 0) GTEST_SKIP() << "skipped: there is a CUDA device";
  EXPECT_TRUE(FlashInferWorkspace::compiled_with(DeviceKind::kCuda));
  try {
    FlashInferWorkspace::create(0, 0);
    ADD_FAILURE() << "a workspace on no device";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kNoDevice);
    EXPECT_NE(std::string(error.what()).find("no CUDA device"), std::string::npos) << error.what();
  }
}

TEST_F(Cuda, DeviceThatDoesNotExistIsNamed) {
  try {
    FlashInferWorkspace::create(device_count());
    ADD_FAILURE() << "a workspace on a device that does not exist";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kNoDevice);
    EXPECT_NE(std::string(error.what()).find("device_index is " + std::to_string(device_count())), std::string::npos)
        << error.what();
  }
}

TEST_F(Cuda, PropsAreTheDevices) {
  const auto workspace = make_workspace(kDevice);
  cudaDeviceProp prop{};
  check(cudaGetDeviceProperties(&prop, kDevice));
  const DeviceProps& props = workspace->device_props();
  EXPECT_EQ(props.kind, DeviceKind::kCuda);
  EXPECT_EQ(props.num_workers, prop.multiProcessorCount);
  EXPECT_EQ(props.compute_capability, 10 * prop.major + prop.minor);
  EXPECT_GE(props.tile_blocks_per_sm, 1);
  EXPECT_GE(props.decode_blocks_per_sm, 1);
}

TEST_F(Cuda, UploadsInFlightAreNotOverwritten) {
  const auto workspace = make_workspace(kDevice);
  const OwnedStream stream;
  std::vector<std::unique_ptr<Problem>> problems;
  for (int i = 0; i < 64; ++i) {
    std::vector<std::int32_t> kv_lens;
    for (int r = 0; r < 4; ++r) kv_lens.push_back(1 + 37 * (4 * i + r) % 500);
    problems.push_back(std::make_unique<Problem>(kDevice, decode(kv_lens), rng_));
    problems.back()->call(*workspace);  // a kernel's first launch may wait for the device
    problems.back()->poison_outputs();
  }
  workspace->invalidate_runtime_cache();
  synchronize(kDevice);
  Gate gate(stream.get());
  for (const auto& problem : problems) {
    workspace->decode(problem->q().device(), problem->cache().device(), problem->table(), problem->description().params,
                      problem->out().device(), problem->device_lse(), {}, stream.get());
    // A plan that fails between two good ones leaves nothing behind.
    AttentionParams bad = problem->description().params;
    bad.num_kv_heads = 3;
    EXPECT_THROW(workspace->plan_decode(problem->table(), {.params = bad}), Error);
  }
  gate.release();
  stream.synchronize();
  for (const auto& problem : problems) {
    problem->fetch_outputs();
    EXPECT_TRUE(problem->check());
  }
}

TEST_F(Cuda, AnErrorThatNobodyReadIsNotOurs) {
  const auto workspace = make_workspace(kDevice);
  Problem problem(kDevice, decode({300, 20}), rng_);
  for (int i = 0; i < 3; ++i) {
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, std::size_t{1} << 50), cudaErrorMemoryAllocation);
    problem.call(*workspace);
    EXPECT_TRUE(problem.check());
    ASSERT_EQ(cudaMalloc(&memory, std::size_t{1} << 50), cudaErrorMemoryAllocation);
    EXPECT_TRUE(problem.grow(*workspace, 1));
    cudaGetLastError();
  }
}

TEST_F(Cuda, PagesBeyondWhat32BitsCount) {
  const auto workspace = make_workspace(kDevice);
  Problem problem(kDevice, decode({40, 70, 129}), rng_);
  KvCache kv = problem.cache().device();
  const std::size_t page_bytes = static_cast<std::size_t>(kv.k_stride.page) * size_of(kv.dtype);
  const std::int64_t stride = ((std::int64_t{1} << 32) + (std::int64_t{1} << 28)) / kv.num_pages / 64 * 64;
  const std::size_t far_bytes = static_cast<std::size_t>(kv.num_pages * stride) * size_of(kv.dtype);
  std::vector<void*> owned;
  const auto spread = [&](const void* pages) -> void* {
    void* far = nullptr;
    if (cudaMalloc(&far, far_bytes) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    owned.push_back(far);
    check(cudaMemset(far, 0xFF, far_bytes));
    for (std::int64_t page = 0; page < kv.num_pages; ++page) {
      check(cudaMemcpy(static_cast<std::byte*>(far) + page * stride * static_cast<std::int64_t>(size_of(kv.dtype)),
                       static_cast<const std::byte*>(pages) + page * static_cast<std::int64_t>(page_bytes), page_bytes,
                       cudaMemcpyDeviceToDevice));
    }
    return far;
  };
  kv.k = spread(kv.k);
  kv.v = spread(kv.v);
  kv.k_stride.page = kv.v_stride.page = stride;
  if (kv.k != nullptr && kv.v != nullptr) {
    problem.poison_outputs();
    workspace->decode(problem.q().device(), kv, problem.table(), problem.description().params, problem.out().device(),
                      problem.device_lse());
    problem.fetch_outputs();
    EXPECT_TRUE(problem.check());
  }
  for (void* far : owned) cudaFree(far);
  if (owned.size() < 2) GTEST_SKIP() << "skipped: the device has no " << 2 * far_bytes << " bytes free";
}

TEST_F(Cuda, PartialResultsOfFewAndOfManyRowsAreMerged) {
  WorkspaceOptions options;
  options.plan = {.batch_invariant = true, .fixed_split_tokens = 64};
  const auto workspace = make_workspace(kDevice, options);
  for (const std::size_t batch : {3, 63, 64, 101}) {
    std::vector<std::int32_t> kv_lens;
    for (std::size_t r = 0; r < batch; ++r) kv_lens.push_back(rng_.pick({0, 1, 64, rng_.uniform(1, 700)}));
    kv_lens.front() = 64 * 70 + 5;  // more states than a warp has lanes
    Problem problem(kDevice, decode(kv_lens, 32, 8), rng_);
    problem.call(*workspace);
    EXPECT_TRUE(problem.check()) << "batch " << batch;
  }
}

// Our own kernel's blocks merge into outputs that they can write sixteen bytes at a time; the merge kernel into others.
TEST_F(Cuda, WhoeverMergesTheResultsAreTheSameBits) {
  const auto workspace = make_workspace(kDevice, {.cuda_route = CudaRoute::kStream});
  const auto finely_cut = make_workspace(
      kDevice, {.plan = {.batch_invariant = true, .fixed_split_tokens = 64}, .cuda_route = CudaRoute::kStream});
  for (int i = 0; i < 40; ++i) {
    const std::int32_t tokens = rng_.pick({1, 1, 2, 5});
    const std::int32_t kv_heads = rng_.pick({1, 2, 4});
    Case c = decode({}, kv_heads * rng_.pick({1, 3, 4, 6}), kv_heads);
    if (tokens > 1) c.op = Op::kVerify;
    for (int r = rng_.uniform(1, 5); r > 0; --r) c.kv_lens.push_back(rng_.pick({0, 3, rng_.uniform(64, 9000)}));
    if (i % 8 == 0) c.kv_lens.front() = 17000;  // more chunks than a block holds the weights of
    c.qo_lens.assign(c.kv_lens.size(), tokens);
    c.params.window_left = rng_.pick({-1, -1, 500});
    c.sinks = rng_.chance(0.5);
    Problem problem(kDevice, c, rng_);
    const Tensor out = problem.out().device();
    const auto bytes = static_cast<std::size_t>(out.rows * out.heads * out.dim) * size_of(out.dtype);
    for (FlashInferWorkspace* const ws : {workspace.get(), finely_cut.get()}) {
      problem.call(*ws);
      ASSERT_TRUE(problem.check()) << c;
      const std::vector<float> lse = problem.lse();
      Mirror<std::byte> aligned(kDevice, std::vector<std::byte>(bytes, std::byte{0xFF}));
      Mirror<std::byte> odd(kDevice, std::vector<std::byte>(bytes + 2, std::byte{0xFF}));
      for (std::byte* const data : {odd.device() + 2, aligned.device(), aligned.device()}) {
        problem.poison_outputs();
        Tensor to = out;
        to.data = data;
        if (tokens > 1) {
          ws->verify(problem.q().device(), tokens, problem.cache().device(), problem.table(), c.params, to,
                     problem.device_lse(), problem.device_extras());
        } else {
          ws->decode(problem.q().device(), problem.cache().device(), problem.table(), c.params, to,
                     problem.device_lse(), problem.device_extras());
        }
        synchronize(kDevice);
        problem.fetch_outputs();
        ASSERT_EQ(std::memcmp(problem.lse().data(), lse.data(), lse.size() * sizeof(float)), 0) << c;
      }
      aligned.download();
      odd.download();
      ASSERT_EQ(std::memcmp(odd.host().data() + 2, aligned.host().data(), bytes), 0) << c;
    }
  }
}

TEST_F(Cuda, PlanOnOneStreamRunOnAnother) {
  const auto workspace = make_workspace(kDevice);
  const OwnedStream first;
  const OwnedStream second;
  for (int i = 0; i < 8; ++i) {
    Problem a(kDevice, decode({1000 + i, 3, 70}), rng_);
    Problem b(kDevice, decode({5, 4000 - i, 0, 16}), rng_);
    a.call(*workspace);
    b.call(*workspace);
    workspace->invalidate_runtime_cache();
    a.poison_outputs();
    b.poison_outputs();
    synchronize(kDevice);
    const auto call = [&](Problem& problem, cudaStream_t stream) {
      workspace->decode(problem.q().device(), problem.cache().device(), problem.table(), problem.description().params,
                        problem.out().device(), problem.device_lse(), {}, stream);
    };
    // The second call takes the first one's plan and scratch while the first may still be waiting.
    Gate gate(first.get());
    call(a, first.get());
    call(b, first.get());
    call(a, second.get());
    call(b, second.get());
    gate.release();
    first.synchronize();
    second.synchronize();
    a.fetch_outputs();
    b.fetch_outputs();
    EXPECT_TRUE(a.check());
    EXPECT_TRUE(b.check());
  }
}

TEST_F(Cuda, DestroyingAWorkspaceWaitsForItsWork) {
  const OwnedStream stream;
  Problem problem(kDevice, decode({3000, 17}), rng_);
  problem.poison_outputs();
  synchronize(kDevice);
  auto workspace = make_workspace(kDevice);
  problem.call(*workspace);
  problem.poison_outputs();
  synchronize(kDevice);
  {
    Gate gate(stream.get());
    workspace->decode(problem.q().device(), problem.cache().device(), problem.table(), problem.description().params,
                      problem.out().device(), problem.device_lse(), {}, stream.get());
    std::jthread opener([&] { gate.release(); });
    workspace.reset();
  }
  stream.synchronize();
  problem.fetch_outputs();
  EXPECT_TRUE(problem.check());
}

TEST_F(Cuda, TwoWorkspacesOnTwoThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&wrong, t] {
      Rng rng(static_cast<std::uint64_t>(1000 + t));
      const auto workspace = make_workspace(kDevice);
      for (int i = 0; i < 20; ++i) {
        Problem problem(kDevice, decode({700 + 13 * i, 1 + i, 33}), rng);
        problem.call(*workspace);
        if (!problem.check()) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(Cuda, LongPrefills) {
  const auto workspace = make_workspace(kDevice);
  for (int round = 0; round < 6; ++round) {
    Case c{.op = round % 2 == 0 ? Op::kPrefill : Op::kRagged,
           .params = {.num_qo_heads = 32, .num_kv_heads = 8, .head_dim_qk = 128},
           .sinks = round % 3 == 1};
    c.params.causal = round < 4;
    for (int r = 0; r < 4; ++r) {
      c.qo_lens.push_back(rng_.uniform(r == 3 ? 0 : 129, 700));
      c.kv_lens.push_back(r == 1 ? rng_.uniform(1, 128) : c.qo_lens.back() + rng_.uniform(0, 900));
    }
    Problem problem(kDevice, c, rng_);
    for (int again = 0; again < 20; ++again) {
      problem.call(*workspace);
      ASSERT_TRUE(problem.check()) << "round " << round << ", call " << again;
    }
  }
}

TEST_F(Cuda, KAndVOfDifferentStrides) {
  const auto workspace = make_workspace(kDevice);
  for (const auto& [qo_heads, kv_heads] : {std::pair{4, 4}, {8, 2}}) {
    Problem problem(kDevice, decode({300, 5, 0}, qo_heads, kv_heads), rng_);
    const KvCache whole = problem.cache().device();
    // V moves into a pool of twice the page stride.
    const std::size_t page_bytes = static_cast<std::size_t>(whole.v_stride.page) * size_of(whole.dtype);
    DeviceBuffer spread(kDevice, 2 * page_bytes * static_cast<std::size_t>(whole.num_pages));
    check(cudaMemcpy2D(spread.data(), 2 * page_bytes, whole.v, page_bytes, page_bytes,
                       static_cast<std::size_t>(whole.num_pages), cudaMemcpyDeviceToDevice));
    KvCache kv = whole;
    kv.v = spread.data();
    kv.v_stride.page *= 2;
    problem.poison_outputs();
    workspace->decode(problem.q().device(), kv, problem.table(), problem.description().params, problem.out().device(),
                      problem.device_lse());
    problem.fetch_outputs();
    EXPECT_TRUE(problem.check());
  }
}

/// Memory from CUDA's own pool, and what the callbacks were given.
struct WatchedPool {
  std::set<void*> live;
  std::set<Stream> streams;
  bool device_was_current = true;
  bool late = false;  ///< memory is NaN from some time after the call on

  Allocator allocator() {
    return {.allocate = [](void* self, std::size_t bytes, std::size_t alignment, Stream stream) -> void* {
              auto& pool = *static_cast<WatchedPool*>(self);
              pool.note(stream);
              void* memory = nullptr;
              EXPECT_EQ(cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream)), cudaSuccess);
              EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % alignment, 0U);
              pool.live.insert(memory);
              if (pool.late) spoil_late(memory, bytes, static_cast<cudaStream_t>(stream));
              return memory;
            },
            .free =
                [](void* self, void* memory, std::size_t, Stream stream) {
                  auto& pool = *static_cast<WatchedPool*>(self);
                  pool.note(stream);
                  EXPECT_EQ(pool.live.erase(memory), 1U);
                  EXPECT_EQ(cudaFreeAsync(memory, static_cast<cudaStream_t>(stream)), cudaSuccess);
                },
            .context = this};
  }
  static void spoil_late(void* memory, std::size_t bytes, cudaStream_t stream) {
    const auto wait = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
    EXPECT_EQ(cudaLaunchHostFunc(stream, wait, nullptr), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(memory, 0xFF, bytes, stream), cudaSuccess);
  }
  void note(Stream stream) {
    int current = -1;
    device_was_current &= cudaGetDevice(&current) == cudaSuccess && current == kDevice;
    streams.insert(stream);
  }
};

TEST_F(Cuda, TheCallersAllocatorIsGivenTheCallsStream) {
  WatchedPool pool;
  {
    const auto workspace = make_workspace(kDevice, {.workspace_bytes = 64, .allocator = pool.allocator()});
    const OwnedStream stream;
    Problem problem(kDevice, decode({6000, 17}), rng_);
    problem.call(*workspace);
    EXPECT_TRUE(problem.check());
    EXPECT_FALSE(pool.streams.contains(stream.get()));
    workspace->invalidate_runtime_cache();
    Problem larger(kDevice, decode({60000, 17, 3000}), rng_);
    larger.poison_outputs();
    synchronize(kDevice);
    workspace->decode(larger.q().device(), larger.cache().device(), larger.table(), larger.description().params,
                      larger.out().device(), larger.device_lse(), {}, stream.get());
    EXPECT_TRUE(pool.streams.contains(stream.get()));
    stream.synchronize();
    larger.fetch_outputs();
    EXPECT_TRUE(larger.check());
  }
  EXPECT_TRUE(pool.live.empty());
  EXPECT_FALSE(pool.streams.contains(nullptr));
  EXPECT_TRUE(pool.device_was_current);
}

// It comes on a stream of the workspace's own, which nothing orders with the default stream by itself.
TEST_F(Cuda, MemoryForACallOnTheDefaultStreamIsReadyFirst) {
  WatchedPool pool;
  pool.late = true;
  for (const CudaRoute route : {CudaRoute::kTable, CudaRoute::kTile, CudaRoute::kHopper, CudaRoute::kHopperPaged}) {
    const auto workspace = make_workspace(kDevice, {.cuda_route = route, .allocator = pool.allocator()});
    for (const Op op : {Op::kDecode, Op::kPrefill, Op::kRagged}) {
      Case c = decode({900, 40});
      c.op = op;
      c.spacing = Spacing::kStrided;
      if (op != Op::kDecode) c.qo_lens = {300, 17};
      Problem problem(kDevice, c, rng_);
      for (int i = 0; i < 2; ++i) {
        problem.call(*workspace);
        EXPECT_TRUE(problem.check()) << "route " << static_cast<int>(route);
      }
    }
  }
}

// Lengths about the edges of its tiles (128 and 192 packed rows) and blocks (80 and 128 keys).
TEST_F(Cuda, OurPrefillKernelAgreesAtEveryEdge) {
  const auto workspace = make_workspace(kDevice, {.cuda_route = CudaRoute::kPrefill});
  for (int trial = 0; trial < 120; ++trial) {
    Case c{.op = rng_.pick({Op::kPrefill, Op::kPrefill, Op::kRagged})};
    AttentionParams& params = c.params;
    params.num_kv_heads = rng_.pick({1, 2, 3});
    params.num_qo_heads = params.num_kv_heads * rng_.pick({1, 3, 4, 5, 7, 8, 16});
    params.head_dim_qk = params.head_dim_vo = rng_.pick({64, 128, 128, 256});
    params.causal = rng_.chance(0.7);
    if (rng_.chance(0.3)) params.window_left = rng_.pick({0, 1, 63, 80, 127, 200});
    if (rng_.chance(0.2)) params.logits_soft_cap = 30;
    c.q_dtype = c.kv_dtype = rng_.pick({DType::kBFloat16, DType::kFloat16});
    c.page_size = rng_.pick({16, 48, 64, 80, 128, 4096, 7});
    c.layout = rng_.pick({CacheLayout::kNhd, CacheLayout::kHnd, CacheLayout::kPadded});
    c.spacing = rng_.pick({Spacing::kContiguous, Spacing::kStrided});
    c.lse = rng_.chance(0.7);
    c.sinks = rng_.chance(0.25);
    c.q_deviation = rng_.pick({1.0F, 1.0F, 8.0F});  // the reference of the exponentials has to be raised
    if (c.op == Op::kPrefill) {
      if (rng_.chance(0.2)) c.kv_dtype = DType::kFloat8E4M3;
      c.k_scale = rng_.pick({0.37F, 1.0F});
      c.v_scale = rng_.pick({0.9F, 1.0F});
      c.head_scales = rng_.chance(0.3);
    }
    for (int r = rng_.uniform(1, 5); r > 0; --r) {
      const std::int32_t keys = rng_.pick({0, 1, 15, 16, 79, 80, 81, 127, 128, 129, 160, 256, 639, 640, 1000});
      c.kv_lens.push_back(keys);
      c.qo_lens.push_back(rng_.pick({0, 1, 2, 24, 47, 48, 49, 64, keys, std::min(keys, 200)}));
    }
    if (std::ranges::all_of(c.qo_lens, [](std::int32_t rows) { return rows == 0; })) c.qo_lens.back() = 1;
    Problem problem(kDevice, c, rng_);
    problem.call(*workspace);
    ASSERT_TRUE(problem.check()) << c;
  }
}

// Few rows over many keys: tiles whose keys are cut, beside short and empty requests.
TEST_F(Cuda, OurPrefillKernelCutsKeys) {
  const auto workspace = make_workspace(kDevice, {.cuda_route = CudaRoute::kPrefill});
  for (int trial = 0; trial < 40; ++trial) {
    Case c{.op = rng_.pick({Op::kPrefill, Op::kPrefill, Op::kRagged})};
    AttentionParams& params = c.params;
    params.num_kv_heads = rng_.pick({1, 1, 2, 3});
    params.num_qo_heads = params.num_kv_heads * rng_.pick({1, 4, 7, 8});
    params.head_dim_qk = params.head_dim_vo = rng_.pick({64, 128, 128, 256});
    params.causal = rng_.chance(0.7);
    if (rng_.chance(0.3)) params.window_left = rng_.pick({100, 2000, 5000});
    if (rng_.chance(0.2)) params.logits_soft_cap = 30;
    c.q_dtype = c.kv_dtype = rng_.pick({DType::kBFloat16, DType::kFloat16});
    c.page_size = rng_.pick({16, 64, 7});
    c.lse = rng_.chance(0.7);
    c.sinks = rng_.chance(0.3);
    c.q_deviation = rng_.pick({1.0F, 8.0F});
    if (c.op == Op::kPrefill) {
      if (rng_.chance(0.2)) c.kv_dtype = DType::kFloat8E4M3;
      c.k_scale = rng_.pick({0.37F, 1.0F});
      c.head_scales = rng_.chance(0.3);
    }
    c.kv_lens = {rng_.uniform(4000, 12000)};
    c.qo_lens = {rng_.uniform(1, 60)};
    for (int r = rng_.uniform(0, 3); r > 0; --r) {
      const std::int32_t keys = rng_.pick({0, 1, 100, 2000, 7000});
      c.kv_lens.push_back(keys);
      c.qo_lens.push_back(rng_.pick({0, 1, 30, 50}));
    }
    Problem problem(kDevice, c, rng_);
    for (int i = 0; i < 2; ++i) {  // the second call finds the counters as the first left them
      problem.call(*workspace);
      ASSERT_TRUE(problem.check()) << c;
    }
  }
}

// Its blocks arrive in any order.
TEST_F(Cuda, OurPrefillKernelGivesTheSameBitsForCutKeys) {
  const auto workspace = make_workspace(kDevice, {.cuda_route = CudaRoute::kPrefill});
  Case c{.op = Op::kPrefill, .qo_lens = {300}, .kv_lens = {20000}, .lse = true};
  c.params = {.num_qo_heads = 8, .num_kv_heads = 1, .head_dim_qk = 128};
  Problem problem(kDevice, c, rng_);
  ASSERT_GT(problem.plan(*workspace).info().scratch_bytes, 0U) << "nothing was cut";
  problem.call(*workspace);
  ASSERT_TRUE(problem.check());
  const auto values = [&] {
    std::vector<float> all = problem.lse();
    const TestTensor& out = problem.out();
    for (std::int64_t row = 0; row < out.rows(); ++row) {
      for (std::int64_t i = 0; i < out.heads() * out.dim(); ++i)
        all.push_back(out.at(row, i / out.dim(), i % out.dim()));
    }
    return all;
  };
  const std::vector<float> first = values();
  for (int i = 0; i < 20; ++i) {
    problem.call(*workspace);
    problem.fetch_outputs();
    ASSERT_EQ(values(), first);
  }
}

TEST_F(Cuda, OurPrefillKernelCutsWhatFixedScratchHolds) {
  Case c{.op = Op::kPrefill, .qo_lens = {300}, .kv_lens = {8000}};
  c.params = {.num_qo_heads = 8, .num_kv_heads = 1, .head_dim_qk = 128};
  Problem problem(kDevice, c, rng_);
  const auto free_workspace = make_workspace(kDevice, {.cuda_route = CudaRoute::kPrefill});
  const std::size_t needed = problem.plan(*free_workspace).info().scratch_bytes;
  ASSERT_GT(needed, 0U);
  for (const std::size_t bytes : {needed, needed - 1, needed / 3, std::size_t{64}}) {
    const auto workspace =
        make_workspace(kDevice, {.workspace_bytes = bytes, .fixed_size = true, .cuda_route = CudaRoute::kPrefill});
    EXPECT_LE(problem.plan(*workspace).info().scratch_bytes, bytes);
    problem.call(*workspace);
    EXPECT_TRUE(problem.check()) << bytes;
  }
}

TEST_F(Cuda, OurPrefillKernelKeepsNotANumberWhereItBelongs) {
  const auto workspace = make_workspace(kDevice, {.cuda_route = CudaRoute::kPrefill});
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Op op : {Op::kPrefill, Op::kRagged}) {
    for (const bool key : {true, false}) {
      Case c{.op = op, .qo_lens = {100, 300, 70}, .kv_lens = {100, 300, 333}};
      c.params = {.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 128, .head_dim_vo = 128, .causal = false};
      Problem problem(kDevice, c, rng_);
      problem.spoil(key, 1, rng_.pick({0, 80, 299}), 1, 5, kNan);
      problem.spoil_query(450, 3, 9, kNan);
      problem.call(*workspace);
      EXPECT_TRUE(problem.check()) << op << (key ? " key" : " value");
    }
    {
      // Rows before the first key share tiles with rows that see the value.
      Case c{.op = op, .qo_lens = {300}, .kv_lens = {100}};
      c.params = {.num_qo_heads = 4, .num_kv_heads = 2, .head_dim_qk = 128};
      Problem problem(kDevice, c, rng_);
      problem.spoil(false, 0, 0, 1, 5, kNan);
      problem.call(*workspace);
      EXPECT_TRUE(problem.check()) << op << " value behind empty rows";
    }
    {
      // A key that is seen and weighs nothing: only the sink is left.
      Case c{.op = op, .qo_lens = {40}, .kv_lens = {1}, .sinks = true};
      c.params = {.num_qo_heads = 4, .num_kv_heads = 2, .head_dim_qk = 128, .causal = false};
      Problem problem(kDevice, c, rng_);
      problem.spoil(true, 0, 0, 1, 5, -std::numeric_limits<float>::infinity());
      problem.call(*workspace);
      EXPECT_TRUE(problem.check()) << op << " weightless key";
    }
  }
}

// The reference that one row raises is the other rows' too.
TEST_F(Cuda, OurPrefillKernelRaisesReferencesWithoutDrift) {
  const auto workspace = make_workspace(kDevice, {.cuda_route = CudaRoute::kPrefill});
  for (const float deviation : {20.0F, 60.0F}) {
    Case c{.op = Op::kPrefill, .qo_lens = {200}, .kv_lens = {6000}};
    c.params = {.num_qo_heads = 4, .num_kv_heads = 2, .head_dim_qk = 64, .causal = false};
    c.q_deviation = deviation;
    Problem problem(kDevice, c, rng_);
    problem.call(*workspace);
    EXPECT_TRUE(problem.check()) << "queries of deviation " << deviation;
  }
}

TEST_F(Cuda, TablesAreReadInStreamOrder) {
  const auto workspace = make_workspace(kDevice);
  const OwnedStream stream;
  const Mirror<std::int32_t> indptr(kDevice, {0, 2});
  const Mirror<std::int32_t> last_page_len(kDevice, std::vector<std::int32_t>{5});
  const Mirror<std::int32_t> indices(kDevice, {3, 4});
  const Mirror<std::int32_t> fresh(kDevice, {8, 9});
  std::vector<std::int32_t> kept;
  {
    Gate gate(stream.get());
    check(cudaMemcpyAsync(indices.device(), fresh.device(), 2 * sizeof(std::int32_t), cudaMemcpyDeviceToDevice,
                          stream.get()));
    std::jthread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      gate.release();
    });
    const PageTable read = workspace->read_table({.page_size = 16,
                                                  .num_pages = 10,
                                                  .indptr = {indptr.device(), 2},
                                                  .indices = {indices.device(), 2},
                                                  .last_page_len = {last_page_len.device(), 1}},
                                                 stream.get());
    kept.assign(read.indices().begin(), read.indices().end());
  }
  EXPECT_EQ(kept, fresh.host());
}

}  // namespace
}  // namespace fiw::test
