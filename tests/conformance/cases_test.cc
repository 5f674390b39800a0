// Small inputs that have gone wrong in serving systems before, each with its neighbours: interleaved plans, exact and
// dirty scratch, surplus pages, odd group sizes, empty and extreme rows, merging of parts, fp8 scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/numeric.h"
#include "support/problem.h"

namespace fiw::test {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

class Cases : public testing::TestWithParam<int>, public Seeded {
 protected:
  static AttentionParams heads(std::int32_t qo, std::int32_t kv, std::int32_t dim) {
    return {.num_qo_heads = qo, .num_kv_heads = kv, .head_dim_qk = dim};
  }

  void expect_right(FlashInferWorkspace& workspace, const Case& c) {
    Problem problem(GetParam(), c, rng_);
    ASSERT_NO_THROW(problem.call(workspace)) << c;
    EXPECT_TRUE(problem.check());
  }
};

// --- interleaved plans
// ---------------------------------------------------------------------------------------------------

TEST_P(Cases, LayersOfTwoKindsAlternate) {
  const auto workspace = make_workspace(GetParam());
  Case full{.params = heads(12, 2, 64), .qo_lens = {1, 1}, .kv_lens = {40, 40}};
  Case sliding = full;
  sliding.params = heads(18, 2, 64);
  sliding.params.window_left = 7;
  Problem full_layer(GetParam(), full, rng_);
  Problem sliding_layer(GetParam(), sliding, rng_);
  const AttentionStep full_step = full_layer.plan(*workspace);
  const AttentionStep sliding_step = sliding_layer.plan(*workspace);
  for (int layer = 0; layer < 6; ++layer) {
    Problem& problem = layer % 2 == 0 ? full_layer : sliding_layer;
    problem.run(layer % 2 == 0 ? full_step : sliding_step);
    EXPECT_TRUE(problem.check()) << "layer " << layer;
  }

  sliding_layer.poison_outputs();
  EXPECT_THROW(full_step.run(sliding_layer.q().device(), full_layer.cache().device(), sliding_layer.out().device()),
               Error);
  sliding_layer.fetch_outputs();
  EXPECT_TRUE(sliding_layer.outputs_untouched());
  full_layer.run(full_step);
  EXPECT_TRUE(full_layer.check());
}

TEST_P(Cases, NoFieldOfAKeyIsForgotten) {
  using Change = void (*)(Case&);
  const std::pair<const char*, Change> kChanges[] = {
      {"sm_scale", [](Case& c) { c.params.sm_scale = 3.0F / 8.0F; }},
      {"soft cap", [](Case& c) { c.params.logits_soft_cap = 50.0F; }},
      {"window", [](Case& c) { c.params.window_left = 7; }},
      {"causal", [](Case& c) { c.params.causal = false; }},
      {"q dtype", [](Case& c) { c.q_dtype = DType::kFloat16; }},
      {"kv dtype", [](Case& c) { c.kv_dtype = DType::kFloat16; }},
      {"lse", [](Case& c) { c.lse = false; }},
      {"sinks", [](Case& c) { c.sinks = true; }},
      {"alibi", [](Case& c) { c.alibi = true; }},
      {"mask", [](Case& c) { c.mask = true; }},
      {"qo heads", [](Case& c) { c.params.num_qo_heads = 6; }},
      {"kv heads", [](Case& c) { c.params.num_kv_heads = 4; }},
      {"head dim", [](Case& c) { c.params.head_dim_qk = 80; }},
      {"value head dim", [](Case& c) { c.params.head_dim_vo = 80; }},
      {"page size", [](Case& c) { c.page_size = 15; }},  // as many pages
      {"pages",
       [](Case& c) {
         c.kv_lens = {40, 49};
       }},
  };
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify}) {
    const auto workspace = make_workspace(GetParam());
    const std::int32_t qo_len = op == Op::kDecode ? 1 : 3;
    const Case base{.op = op, .params = heads(12, 2, 64), .qo_lens = {qo_len, qo_len}, .kv_lens = {40, 40}};
    Problem original(GetParam(), base, rng_);
    original.call(*workspace);
    EXPECT_TRUE(original.check());
    for (const auto& [name, change] : kChanges) {
      Case changed = base;
      change(changed);
      Problem other(GetParam(), changed, rng_);
      EXPECT_FALSE(other.plan(*workspace).info().cache_hit) << op << " took a plan made for another " << name;
      EXPECT_TRUE(original.plan(*workspace).info().cache_hit) << op << " lost its plan to another " << name;
      other.call(*workspace);
      EXPECT_TRUE(other.check()) << name;
      original.call(*workspace);
      EXPECT_TRUE(original.check()) << name;
    }
  }
}

// --- exact scratch
// -------------------------------------------------------------------------------------------------------

TEST_P(Cases, ScratchOfExactlyTheNeededSize) {
  for (const Op op : {Op::kDecode, Op::kVerify, Op::kPrefill}) {
    for (const bool lse : {false, true}) {
      const std::int32_t qo_len = op == Op::kDecode ? 1 : 3;
      Case big{.op = op, .params = heads(16, 2, 128), .qo_lens = {qo_len}, .kv_lens = {6000}, .lse = lse};
      WorkspaceOptions options{.num_threads = 2};
      Problem problem(GetParam(), big, rng_);
      const std::size_t needed = problem.plan(*make_workspace(GetParam(), options)).info().scratch_bytes;
      ASSERT_GT(needed, 1U) << "the case must take scratch to say anything: " << big;

      options.fixed_size = true;
      options.workspace_bytes = needed;
      problem.call(*make_workspace(GetParam(), options));
      EXPECT_TRUE(problem.check());

      options.workspace_bytes = needed - 1;
      const auto small = make_workspace(GetParam(), options);
      try {
        problem.call(*small);
        ADD_FAILURE() << needed - 1 << " bytes were taken as enough for " << big;
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), Status::kWorkspaceTooSmall);
        EXPECT_EQ(error.bytes_required(), needed);
        EXPECT_NE(std::string(error.what()).find(std::to_string(needed)), std::string::npos) << error.what();
      }
      problem.fetch_outputs();
      EXPECT_TRUE(problem.outputs_untouched());
      Case modest = big;
      modest.kv_lens = {20};
      expect_right(*small, modest);
    }
  }
}

TEST(RequiredWorkspace, GraphGridsOfAnyDeviceStayInProportion) {
  for (const std::int32_t workers : {132, 144, 108}) {
    DeviceProps device = DeviceProps::h200();
    device.num_workers = workers;
    const WorkspaceLimits short_decode{.params = {.num_qo_heads = 32, .num_kv_heads = 2, .head_dim_qk = 256},
                                       .max_batch = 512,
                                       .max_kv_len = 16,
                                       .page_size = 16,
                                       .graph = true};
    // One token each is one chunk each: 512 x 32 partial rows of 256 floats would be 16 MB, the padded grid a bit more.
    EXPECT_LT(FlashInferWorkspace::required_workspace(device, short_decode), std::size_t{64} << 20) << workers;
    for (const std::int32_t kv_len : {512, 8192, 131072}) {
      const WorkspaceLimits windows{.params = {.num_qo_heads = 64, .num_kv_heads = 8, .head_dim_qk = 128},
                                    .max_batch = 8,
                                    .max_verify_window = 3,
                                    .max_kv_len = kv_len,
                                    .page_size = 16,
                                    .graph = true};
      const std::size_t bytes = FlashInferWorkspace::required_workspace(device, windows);
      EXPECT_LT(bytes, std::size_t{128} << 20) << workers << " workers, " << kv_len << " tokens";
      EXPECT_GT(bytes, 0U);
    }
  }
}

// --- dirty scratch
// -------------------------------------------------------------------------------------------------------

/// Hands out memory full of 0xFF (NaN to any float) between guards, and looks at the guards when it comes back.
class DirtyMemory {
 public:
  explicit DirtyMemory(int device) : device_(device) {}

  Allocator allocator() {
    return {.allocate = [](void* self, std::size_t bytes, std::size_t alignment,
                           Stream) { return static_cast<DirtyMemory*>(self)->allocate(bytes, alignment); },
            .free = [](void* self, void* memory, std::size_t bytes,
                       Stream) { static_cast<DirtyMemory*>(self)->release(memory, bytes); },
            .context = this};
  }
  std::size_t live() const { return blocks_.size(); }
  std::size_t allocations() const { return allocations_; }
  bool guards_intact() const { return guards_intact_; }

 private:
  static constexpr std::size_t kGuard = 4096;
  static constexpr std::byte kGuardByte{0xA5};

  void* allocate(std::size_t bytes, std::size_t alignment) {
    EXPECT_EQ(kGuard % alignment, 0U);
    DeviceBuffer block(device_, bytes + 3 * kGuard);
    const auto address = reinterpret_cast<std::uintptr_t>(block.data());
    const std::size_t offset = (address + 2 * kGuard - 1) / kGuard * kGuard - address;
    std::vector<std::byte> contents(block.size(), kGuardByte);
    std::fill_n(contents.begin() + static_cast<std::ptrdiff_t>(offset), bytes, std::byte{0xFF});
    block.write(contents);
    synchronize(device_);  // the workspace writes on streams that wait for nothing
    std::byte* const memory = block.data() + offset;
    blocks_.emplace(memory, std::move(block));
    ++allocations_;
    return memory;
  }

  void release(void* memory, std::size_t bytes) {
    synchronize(device_);
    const auto block = blocks_.find(static_cast<std::byte*>(memory));
    if (block == blocks_.end()) {
      guards_intact_ = false;
      return;
    }
    std::vector<std::byte> contents(block->second.size());
    block->second.read(contents);
    const std::ptrdiff_t offset = block->first - block->second.data();
    const auto intact = [](std::byte byte) { return byte == kGuardByte; };
    guards_intact_ &= std::all_of(contents.begin(), contents.begin() + offset, intact);
    guards_intact_ &=
        std::all_of(contents.begin() + offset + static_cast<std::ptrdiff_t>(bytes), contents.end(), intact);
    blocks_.erase(block);
  }

  int device_;
  std::map<std::byte*, DeviceBuffer> blocks_;
  std::size_t allocations_ = 0;
  bool guards_intact_ = true;
};

TEST_P(Cases, DirtyScratchNeverShows) {
  DirtyMemory memory(GetParam());
  {
    const auto workspace =
        make_workspace(GetParam(), {.workspace_bytes = 64, .num_threads = 2, .allocator = memory.allocator()});
    for (int round = 0; round < 2; ++round) {
      for (const Op op : {Op::kDecode, Op::kVerify, Op::kPrefill, Op::kRagged}) {
        const std::int32_t qo_len = op == Op::kDecode ? 1 : 3;
        // Unsplit, then split, then with a plan of a larger batch left behind in the int scratch.
        expect_right(*workspace,
                     {.op = op, .params = heads(16, 2, 128), .qo_lens = {qo_len, qo_len}, .kv_lens = {33, 5}});
        expect_right(*workspace,
                     {.op = op, .params = heads(16, 2, 128), .qo_lens = {qo_len, qo_len}, .kv_lens = {6000, 5}});
        expect_right(*workspace, {.op = op,
                                  .params = heads(16, 2, 128),
                                  .qo_lens = std::vector<std::int32_t>(16, qo_len),
                                  .kv_lens = std::vector<std::int32_t>(16, 100)});
      }
      workspace->invalidate_runtime_cache();
      workspace->invalidate_verify_runtime_cache();
    }
  }
  EXPECT_GT(memory.allocations(), 0U);
  EXPECT_EQ(memory.live(), 0U);
  EXPECT_TRUE(memory.guards_intact());
}

// --- surplus pages
// -------------------------------------------------------------------------------------------------------

TEST(SurplusPage, IsAnErrorWhereLengthsAreGiven) {
  const std::vector<std::int32_t> indptr{0, 2};
  const std::vector<std::int32_t> indices{7, 1};
  const std::vector<std::int32_t> last{16};
  const std::vector<std::int32_t> kv_lens{16};
  try {
    PageTable::from_csr(16, 10, indptr, indices, last, kv_lens);
    FAIL() << "32 slots were taken for 16 tokens";
  } catch (const Error& error) {
    EXPECT_EQ(error.reason(), Reason::kKvLens);
    EXPECT_EQ(error.index(), 0);
    EXPECT_NE(std::string(error.what()).find("32 against 16"), std::string::npos) << error.what();
  }
  EXPECT_EQ(PageTable::from_csr(16, 10, indptr, indices, last).kv_lens()[0], 32);
}

TEST(SurplusPage, BuilderFromLengthsCannotMakeOne) {
  for (const std::int32_t len : {15, 16, 17, 32, 33}) {
    const std::int32_t pages = (len + 15) / 16;
    const std::vector<std::vector<std::int32_t>> exact{std::vector<std::int32_t>(static_cast<std::size_t>(pages), 3)};
    const std::vector<std::int32_t> kv_lens{len};
    const PageTable table = PageTable::from_pages(16, 10, exact, kv_lens);
    EXPECT_EQ(table.indptr()[1], pages);
    EXPECT_EQ(table.last_page_len()[0], len - 16 * (pages - 1));
    EXPECT_EQ(table.kv_lens()[0], len);
  }
}

TEST_P(Cases, LengthsAroundAPageAttendWhatTheySay) {
  const auto workspace = make_workspace(GetParam());
  for (const std::int32_t len : {15, 16, 17, 32, 33}) {
    for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify}) {
      expect_right(*workspace, {.op = op, .qo_lens = {op == Op::kDecode ? 1 : 2}, .kv_lens = {len}});
    }
  }
}

// --- group sizes, head dims, page sizes
// -------------------------------------------------------------------------------------

TEST_P(Cases, OneTokenDecodeReturnsItsValueExactly) {
  const auto workspace = make_workspace(GetParam());
  const auto expect_value = [&](std::int32_t group, std::int32_t dim, std::int32_t page_size) {
    Case c{.params = heads(2 * group, 2, dim), .page_size = page_size, .qo_lens = {1}, .kv_lens = {1}};
    Problem problem(GetParam(), c, rng_);
    problem.call(*workspace);
    EXPECT_TRUE(problem.check());
    const KvCache kv = problem.cache().host();
    for (std::int32_t head = 0; head < 2 * group; ++head) {
      for (std::int32_t d = 0; d < dim; ++d) {
        const std::int64_t at = problem.table().indices()[0] * kv.v_stride.page + head / group * kv.v_stride.head + d;
        ASSERT_EQ(problem.out().at(0, head, d), load_float(kv.v, kv.dtype, at))
            << "head " << head << ", element " << d << " in " << c;
      }
    }
  };
  for (const std::int32_t group : {1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64}) {
    for (const std::int32_t dim : {64, 128, 256}) expect_value(group, dim, 16);
  }
  for (const std::int32_t dim : {8, 56, 72, 80, 96, 224}) expect_value(4, dim, 16);
  for (const std::int32_t page_size : {1, 3, 16, 128, 129, 256, 512}) expect_value(4, 64, page_size);
}

TEST_P(Cases, OddGroupsWithSplitKeys) {
  const auto workspace = make_workspace(GetParam(), {.num_threads = 2});
  for (const std::int32_t group : {3, 5, 6, 7}) {
    for (const Op op : {Op::kDecode, Op::kVerify, Op::kPrefill, Op::kRagged}) {
      expect_right(
          *workspace,
          {.op = op, .params = heads(2 * group, 2, 128), .qo_lens = {op == Op::kDecode ? 1 : 2}, .kv_lens = {700}});
    }
  }
}

TEST_P(Cases, UnsupportedHeadDimIsRefusedBeforeAnyWrite) {
  const auto workspace = make_workspace(GetParam());
  for (const std::int32_t dim : {100, 4, 12, 63, 584, 1024}) {
    Case c{.params = heads(8, 2, 64), .qo_lens = {1}, .kv_lens = {1}};
    Problem problem(GetParam(), c, rng_);
    problem.poison_outputs();
    AttentionParams params = c.params;
    params.head_dim_qk = dim;
    KvCache kv = problem.cache().device();
    ConstTensor q = problem.q().device();
    Tensor out = problem.out().device();
    kv.head_dim_qk = kv.head_dim_vo = dim;
    q.dim = out.dim = dim;
    try {
      workspace->decode(q, kv, problem.table(), params, out);
      ADD_FAILURE() << "head_dim " << dim << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kUnsupported) << error.what();
      EXPECT_NE(std::string(error.what()).find(std::to_string(dim)), std::string::npos) << error.what();
    }
    problem.fetch_outputs();
    EXPECT_TRUE(problem.outputs_untouched());
    problem.call(*workspace);
    EXPECT_TRUE(problem.check());
  }
}

// --- empty, masked and extreme rows
// --------------------------------------------------------------------------------------

TEST_P(Cases, MoreQueriesThanKeys) {
  const auto workspace = make_workspace(GetParam());
  for (const Op op : {Op::kPrefill, Op::kVerify, Op::kRagged}) {
    for (const std::int32_t kv_len : {0, 1, 3, 4}) {
      Problem problem(GetParam(), {.op = op, .qo_lens = {5}, .kv_lens = {kv_len}}, rng_);
      problem.call(*workspace);
      EXPECT_TRUE(problem.check());
      for (std::int64_t row = 0; row < 5 - kv_len; ++row) {
        for (std::int64_t head = 0; head < 8; ++head) {
          EXPECT_EQ(problem.lse()[static_cast<std::size_t>(row * 8 + head)], kMinusInfinity);
          for (std::int64_t d = 0; d < 64; ++d) EXPECT_EQ(problem.out().at(row, head, d), 0.0F);
        }
      }
    }
  }
}

TEST_P(Cases, MoreQueriesThanKeysThroughTheWidestWindow) {
  const auto workspace = make_workspace(GetParam());
  for (const Op op : {Op::kPrefill, Op::kVerify}) {
    for (const bool causal : {false, true}) {
      Case c{.op = op, .qo_lens = {5}, .kv_lens = {3}};
      c.params.causal = causal;
      c.params.window_left = std::numeric_limits<std::int32_t>::max();
      expect_right(*workspace, c);
    }
  }
}

// The stride of an axis with one entry says nothing, and may be anything.
TEST_P(Cases, StridesOfSingleEntries) {
  const auto workspace = make_workspace(GetParam());
  for (const std::int32_t qo_len : {1, 4, 200}) {
    const Case c{.op = Op::kPrefill,
                 .params = heads(2, 1, 128),
                 .page_size = 256,
                 .qo_lens = {qo_len},
                 .kv_lens = {qo_len + 9},
                 .spare_pages = 0};
    Problem problem(GetParam(), c, rng_);
    problem.poison_outputs();
    KvCache kv = problem.cache().device();
    ASSERT_EQ(kv.num_pages, 1);
    for (KvCache::Strides* stride : {&kv.k_stride, &kv.v_stride}) {
      stride->page = 0;
      stride->head = 0;
    }
    workspace->prefill(problem.q().device(), problem.qo_indptr(), kv, problem.table(), problem.description().params,
                       problem.out().device(), problem.device_lse());
    problem.fetch_outputs();
    EXPECT_TRUE(problem.check()) << qo_len << " tokens";
  }
}

TEST_P(Cases, EmptyRequestBesideAFullOne) {
  const auto workspace = make_workspace(GetParam());
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
    for (const std::vector<std::int32_t>& lens : {std::vector<std::int32_t>{0, 7}, {7, 0}, {0, 0}, {0, 7, 0, 0, 30}}) {
      const std::vector<std::int32_t> qo_lens(lens.size(), op == Op::kDecode ? 1 : 2);
      expect_right(*workspace, {.op = op, .qo_lens = qo_lens, .kv_lens = lens});
      expect_right(*workspace, {.op = op, .qo_lens = qo_lens, .kv_lens = lens, .sinks = true});
    }
  }
}

TEST_P(Cases, OneHugeNegativeLogit) {
  const auto workspace = make_workspace(GetParam());
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    Case c{.op = Op::kRagged,
           .params = heads(1, 1, 128),
           .q_dtype = dtype,
           .kv_dtype = dtype,
           .qo_lens = {1},
           .kv_lens = {1}};
    Problem problem(GetParam(), c, rng_);
    for (std::int64_t d = 0; d < 128; ++d) {
      problem.q().set(0, 0, d, 1.0F);
      problem.ragged_k().set(0, 0, d, -4096.0F);
      problem.ragged_v().set(0, 0, d, 1.0F);
    }
    problem.q().upload();
    problem.ragged_k().upload();
    problem.ragged_v().upload();
    problem.call(*workspace);
    for (std::int64_t d = 0; d < 128; ++d) EXPECT_EQ(problem.out().at(0, 0, d), 1.0F);
    EXPECT_NEAR(problem.lse()[0], -46340.95F, 0.01F);
  }
}

TEST_P(Cases, WindowWiderThanTheBand) {
  const auto workspace = make_workspace(GetParam());
  for (const Op op : {Op::kPrefill, Op::kRagged}) {
    for (const bool causal : {false, true}) {
      for (const std::int32_t window : {333, 0, 5000}) {
        Case c{.op = op, .params = heads(8, 2, 128), .qo_lens = {300}, .kv_lens = {4096}};
        c.params.causal = causal;
        c.params.window_left = window;
        expect_right(*workspace, c);
      }
    }
  }
}

// --- merging of parts, fp8 scales
// --------------------------------------------------------------------------------------------

TEST_P(Cases, PrefixAndSuffixMergeIntoASinglePass) {
  constexpr std::int32_t kPrefix = 3072;
  constexpr std::int32_t kSuffix = 64;
  const auto workspace = make_workspace(GetParam());
  const auto other_rank = make_workspace(GetParam());
  for (const Op op : {Op::kDecode, Op::kPrefill}) {
    const std::int32_t rows = op == Op::kDecode ? 1 : kSuffix;
    const Case c{.op = op,
                 .params = heads(8, 2, 128),
                 .q_dtype = DType::kFloat32,
                 .qo_lens = {rows},
                 .kv_lens = {kPrefix + kSuffix}};
    Problem problem(GetParam(), c, rng_);
    const auto part_table = [&](std::int32_t first_token, std::int32_t tokens) {
      const auto pages = problem.table().indices().subspan(static_cast<std::size_t>(first_token / 16),
                                                           static_cast<std::size_t>(tokens / 16));
      const std::vector<std::vector<std::int32_t>> lists{{pages.begin(), pages.end()}};
      return PageTable::from_pages(16, problem.table().num_pages(), lists, std::vector<std::int32_t>{tokens});
    };
    const auto attend = [&](FlashInferWorkspace& on, const PageTable& table, bool causal, TestTensor& out,
                            Mirror<float>& lse) {
      AttentionParams params = c.params;
      params.causal = causal;
      if (op == Op::kDecode) {
        on.decode(problem.q().device(), problem.cache().device(), table, params, out.device(), lse.device());
      } else {
        on.prefill(problem.q().device(), problem.qo_indptr(), problem.cache().device(), table, params, out.device(),
                   lse.device());
      }
    };
    const auto output = [&] { return TestTensor(GetParam(), DType::kFloat32, rows, 8, 128, Spacing::kContiguous); };
    TestTensor prefix_out = output();
    TestTensor suffix_out = output();
    Mirror<float> prefix_lse(GetParam(), static_cast<std::size_t>(rows) * 8);
    Mirror<float> suffix_lse(GetParam(), static_cast<std::size_t>(rows) * 8);
    problem.call(*workspace);
    EXPECT_TRUE(problem.check());
    // Every query comes after the prefix, so that part is not causal; the two parts may be on two ranks.
    attend(*workspace, part_table(0, kPrefix), false, prefix_out, prefix_lse);
    attend(*other_rank, part_table(kPrefix, kSuffix), true, suffix_out, suffix_lse);

    TestTensor merged = output();
    Mirror<float> merged_lse(GetParam(), static_cast<std::size_t>(rows) * 8);
    const std::vector<PartialState> parts{{.out = prefix_out.device(), .lse = prefix_lse.device()},
                                          {.out = suffix_out.device(), .lse = suffix_lse.device()}};
    workspace->merge_states(parts, merged.device(), merged_lse.device());
    merged.download();
    merged_lse.download();
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < 8; ++head) {
        const auto i = static_cast<std::size_t>(row * 8 + head);
        ASSERT_NEAR(merged_lse.host()[i], problem.lse()[i], 1e-3F) << "row " << row << ", head " << head;
        for (std::int64_t d = 0; d < 128; ++d) {
          ASSERT_NEAR(merged.at(row, head, d), problem.out().at(row, head, d), 1e-3F)
              << "row " << row << ", head " << head << ", element " << d;
        }
      }
    }
  }
}

TEST_P(Cases, Fp8ScalesGiveTheDequantisedResult) {
  const auto workspace = make_workspace(GetParam());
  for (const DType fp8 : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const bool head_scales : {false, true}) {
      Case c{.q_dtype = DType::kFloat32, .kv_dtype = fp8, .qo_lens = {1, 1}, .kv_lens = {100, 17}};
      c.k_scale = 0.25F;
      c.v_scale = 0.5F;
      c.head_scales = head_scales;
      Problem problem(GetParam(), c, rng_);
      problem.call(*workspace);
      EXPECT_TRUE(problem.check());

      // The same tokens, dequantised into a fp32 cache.
      const KvCache quantised = problem.cache().host();
      const CacheShape shape{.dtype = DType::kFloat32,
                             .num_pages = quantised.num_pages,
                             .num_kv_heads = quantised.num_kv_heads,
                             .head_dim_qk = quantised.head_dim_qk,
                             .head_dim_vo = quantised.head_dim_vo};
      PagedCache dequantised(GetParam(), shape, rng_);
      const KvCache plain = dequantised.host();
      const std::int64_t per_head = quantised.head_dim_qk;
      for (std::int64_t i = 0; i < quantised.num_pages * quantised.page_size * quantised.num_kv_heads * per_head; ++i) {
        const auto head = static_cast<std::size_t>(i / per_head % quantised.num_kv_heads);
        store_float(plain.k, DType::kFloat32, i,
                    load_float(quantised.k, fp8, i) * 0.25F * (head_scales ? quantised.k_head_scale[head] : 1.0F));
        store_float(plain.v, DType::kFloat32, i,
                    load_float(quantised.v, fp8, i) * 0.5F * (head_scales ? quantised.v_head_scale[head] : 1.0F));
      }
      dequantised.upload();
      TestTensor out(GetParam(), DType::kFloat32, 2, 8, 64, Spacing::kContiguous);
      workspace->decode(problem.q().device(), dequantised.device(), problem.table(), c.params, out.device());
      out.download();
      for (std::int64_t row = 0; row < 2; ++row) {
        for (std::int64_t head = 0; head < 8; ++head) {
          for (std::int64_t d = 0; d < 64; ++d) {
            ASSERT_NEAR(out.at(row, head, d), problem.out().at(row, head, d), 1e-4F)
                << to_string(fp8) << ", row " << row << ", head " << head << ", element " << d;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Cases, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
