// Memory that a call must not be given: elements that share an address, outputs among the inputs, values of an
// enumeration that it does not name; and the unusual layouts that are right and must stay accepted.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "conformance/bad_call.h"
#include "support/problem.h"

namespace fiw::test {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr Op kAllOps[] = {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged};
constexpr auto kNoType = static_cast<DType>(77);

void* at(const void* data, std::int64_t bytes) { return static_cast<std::byte*>(const_cast<void*>(data)) + bytes; }

/// Where small inputs are put so that an output that starts in one ends before anything else. Refused calls do not use
/// what lies there.
alignas(8) std::int32_t pool[1024];

class BadTensor : public BadCall {};

TEST_P(BadTensor, OutWhoseElementsShareMemory) {
  const Expected aliased{Reason::kTensorStride, {"out", "stride", "share memory"}};
  for (const Op op : kAllOps) {
    // 8 heads of 64 elements: a row spans 512 of them, and 2 or 4 rows of a head 128 or 256.
    expect_refused(good(op),
                   {{"rows within the heads of another", [](Arguments& a) { a.out.row_stride = 256; }, aliased},
                    {"rows one element short", [](Arguments& a) { a.out.row_stride = 511; }, aliased},
                    {"heads within the rows of another",
                     [](Arguments& a) {
                       a.out.row_stride = 64;
                       a.out.head_stride = 64 * a.out.rows - 1;
                     },
                     aliased},
                    {"rows and heads at equal strides",
                     [](Arguments& a) { a.out.row_stride = a.out.head_stride = 4096; }, aliased}});
  }
}

TEST_P(BadTensor, OutputsAmongTheInputs) {
  for (const Op op : kAllOps) {
    Case c = good(op);
    c.sinks = c.alibi = true;
    c.mask = true;
    std::vector<Fault> faults{
        {"lse in out",
         [](Arguments& a) { a.lse = static_cast<float*>(a.out.data); },
         {Reason::kTensorOverlap, {"lse overlaps out"}}},
        {"lse at the end of out",
         [](Arguments& a) { a.lse = static_cast<float*>(at(a.out.data, a.out.rows * 8 * 64 * 2 - 4)); },
         {Reason::kTensorOverlap, {"lse overlaps out"}}},
        {"lse in q",
         [](Arguments& a) { a.lse = static_cast<float*>(at(a.q.data, 64)); },
         {Reason::kTensorOverlap, {"lse overlaps q"}}},
        {"lse in sinks",
         [](Arguments& a) {
           a.extras.sinks = reinterpret_cast<const float*>(pool);
           a.lse = reinterpret_cast<float*>(pool + 7);
         },
         {Reason::kTensorOverlap, {"lse overlaps extras.sinks"}}},
        {"lse in the slopes",
         [](Arguments& a) {
           a.extras.alibi_slopes = reinterpret_cast<const float*>(pool);
           a.lse = reinterpret_cast<float*>(pool + 7);
         },
         {Reason::kTensorOverlap, {"lse overlaps extras.alibi_slopes"}}},
        {"lse in mask_indptr",
         [](Arguments& a) {
           if (a.q.device == kCpuDevice) std::copy_n(a.extras.mask_indptr, 3, pool);
           a.extras.mask_indptr = pool;
           a.lse = reinterpret_cast<float*>(pool + 2);
         },
         {Reason::kTensorOverlap, {"lse overlaps extras.mask_indptr"}}},
        {"lse off its alignment",
         [](Arguments& a) { a.lse = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(a.lse) + 2); },
         {Reason::kTensorAlignment, {"lse", "4"}}},
        {"sinks off their alignment",
         [](Arguments& a) {
           a.extras.sinks = reinterpret_cast<const float*>(reinterpret_cast<const std::byte*>(a.extras.sinks) + 1);
         },
         {Reason::kTensorAlignment, {"extras.sinks", "4"}}},
    };
    if (op == Op::kRagged) {
      faults.push_back({"out in k",
                        [](Arguments& a) { a.out.data = at(a.k.data, 128); },
                        {Reason::kTensorOverlap, {"out overlaps k"}}});
      faults.push_back({"out at the end of v",
                        [](Arguments& a) { a.out.data = at(a.v.data, 34 * 2 * 64 * 2); },
                        {Reason::kTensorOverlap, {"overlaps"}}});
      faults.push_back({"lse in v",
                        [](Arguments& a) { a.lse = static_cast<float*>(at(a.v.data, 4)); },
                        {Reason::kTensorOverlap, {"lse overlaps v"}}});
    } else {
      faults.push_back({"out in kv.k",
                        [](Arguments& a) { a.out.data = at(a.kv.k, 256); },
                        {Reason::kTensorOverlap, {"out overlaps kv.k"}}});
      faults.push_back({"out in a page of kv.v that nobody uses",
                        [](Arguments& a) { a.out.data = at(a.kv.v, (a.kv.num_pages - 1) * 16 * 2 * 64 * 2); },
                        {Reason::kTensorOverlap, {"out overlaps kv.v"}}});
      faults.push_back({"lse in kv.k",
                        [](Arguments& a) { a.lse = static_cast<float*>(at(a.kv.k, 4)); },
                        {Reason::kTensorOverlap, {"lse overlaps kv.k"}}});
    }
    expect_refused(c, faults);
  }
}

/// Only the host can tell how long the mask is.
class BadTensorOnHost : public BadCall {};

TEST_P(BadTensorOnHost, OutputsInTheMask) {
  for (const Op op : kAllOps) {
    Case c = good(op);
    c.mask = true;
    expect_refused(c, {{"lse in the mask",
                        [](Arguments& a) {
                          a.extras.mask = reinterpret_cast<const std::uint8_t*>(pool);
                          a.lse = reinterpret_cast<float*>(pool);
                        },
                        {Reason::kTensorOverlap, {"lse overlaps extras.mask"}}}});
  }
}

TEST_P(BadTensorOnHost, OutputsInTheHeadScales) {
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify}) {
    Case c = good(op);
    c.kv_dtype = DType::kFloat8E4M3;
    c.head_scales = true;
    expect_refused(c, {{"lse in k_head_scale",
                        [](Arguments& a) {
                          std::fill_n(pool, 2, 0x3F800000);  // 1.0F
                          a.kv.k_head_scale = reinterpret_cast<const float*>(pool);
                          a.lse = reinterpret_cast<float*>(pool + 1);
                        },
                        {Reason::kTensorOverlap, {"lse overlaps kv.k_head_scale"}}}});
  }
}

TEST_P(BadTensor, TypesThatAreNone) {
  for (const Op op : kAllOps) {
    const Expected no_type{Reason::kTensorDType, {"DType(77)", "expected"}};
    std::vector<Fault> faults{
        {"q of no type", [](Arguments& a) { a.q.dtype = kNoType; }, no_type},
        {"out of no type", [](Arguments& a) { a.out.dtype = kNoType; }, no_type},
        {"q and out of no type", [](Arguments& a) { a.q.dtype = a.out.dtype = kNoType; }, no_type}};
    if (op == Op::kRagged) {
      faults.push_back({"k of no type", [](Arguments& a) { a.k.dtype = kNoType; }, no_type});
      faults.push_back({"v of no type", [](Arguments& a) { a.v.dtype = kNoType; }, no_type});
      faults.push_back({"k and v of no type", [](Arguments& a) { a.k.dtype = a.v.dtype = kNoType; }, no_type});
    } else {
      faults.push_back({"kv of no type", [](Arguments& a) { a.kv.dtype = kNoType; }, no_type});
    }
    expect_refused(good(op), faults);
  }
  Problem problem(GetParam(), good(Op::kPrefill), rng_);
  for (const bool query : {true, false}) {
    StepSpec spec = problem.spec();
    (query ? spec.q_dtype : spec.kv_dtype) = kNoType;
    const WorkspaceStats before = workspace_->stats();
    const Expected expected{Reason::kTensorDType, {query ? "q_dtype" : "kv_dtype", "DType(77)"}};
    expect_error("plan_decode", expected, [&] { workspace_->plan_decode(problem.table(), spec); });
    expect_error("plan_verify", expected, [&] { workspace_->plan_verify(2, problem.table(), spec); });
    expect_error("plan_prefill", expected,
                 [&] { workspace_->plan_prefill(problem.qo_indptr(), problem.table(), spec); });
    EXPECT_TRUE(unchanged(before, workspace_->stats()));
  }
}

TEST(BadEnumeration, WhereverOneIsPassed) {
  std::vector<float> memory(1024);
  const auto layout = static_cast<KvLayout>(9);
  for (const bool interleaved : {false, true}) {
    const auto cache = [&](DType dtype, KvLayout order, std::int32_t page_size) {
      return interleaved
                 ? KvCache::interleaved(memory.data(), dtype, order, 1, page_size, 1 << 20, 1 << 30)
                 : KvCache::contiguous(memory.data(), memory.data(), dtype, order, 1, page_size, 1 << 20, 1 << 30);
    };
    expect_error("layout 9", {Reason::kOptions, {"layout", "9"}}, [&] { cache(DType::kFloat32, layout, 1); });
    expect_error("no type", {Reason::kTensorDType, {"dtype", "77"}}, [&] { cache(kNoType, KvLayout::kNHD, 1); });
    expect_error("a page past int64", {Reason::kSizeOverflow, {"page", "int64"}},
                 [&] { cache(DType::kFloat32, KvLayout::kNHD, 1 << 20); });
  }
  WorkspaceLimits limits{.params = {.num_qo_heads = 1, .num_kv_heads = 1, .head_dim_qk = 64}, .max_batch = 1};
  limits.kv_dtype = kNoType;
  expect_error("limits", {Reason::kTensorDType, {"kv_dtype", "DType(77)"}},
               [&] { FlashInferWorkspace::create(kCpuDevice, {.limits = limits}); });
  expect_error("sizing", {Reason::kTensorDType, {"kv_dtype", "DType(77)"}},
               [&] { FlashInferWorkspace::required_workspace(DeviceProps::cpu(1), limits); });
  limits.kv_dtype = DType::kBFloat16;
  DeviceProps device = DeviceProps::cpu(1);
  device.kind = static_cast<DeviceKind>(5);
  expect_error("device kind", {Reason::kOptions, {"device.kind", "5"}},
               [&] { FlashInferWorkspace::required_workspace(device, limits); });
  EXPECT_FALSE(FlashInferWorkspace::compiled_with(static_cast<DeviceKind>(5)));
}

// --- what is unusual and right
// ---------------------------------------------------------------------------------------------

/// Runs a problem with spoilt arguments that are right, and puts the result where check() looks.
class GoodTensor : public BadCall {};

TEST_P(GoodTensor, HeadMajorOutAndStridesThatDoNotMatter) {
  for (const Op op : kAllOps) {
    Problem problem(GetParam(), good(op), rng_);
    const Arguments plain = arguments(problem);
    TestTensor head_major(GetParam(), DType::kBFloat16, plain.out.heads, plain.out.rows, 64, Spacing::kContiguous);
    Arguments a = plain;
    a.out = head_major.device();
    std::swap(a.out.rows, a.out.heads);
    std::swap(a.out.row_stride, a.out.head_stride);
    problem.poison_outputs();
    ASSERT_NO_THROW(call(op, a)) << op;
    head_major.download();
    for (std::int64_t row = 0; row < plain.out.rows; ++row) {
      for (std::int64_t head = 0; head < plain.out.heads; ++head) {
        for (std::int64_t d = 0; d < 64; ++d) problem.out().set(row, head, d, head_major.at(head, row, d));
      }
    }
    problem.out().upload();
    problem.fetch_outputs();
    EXPECT_TRUE(problem.check()) << op;
  }
  Case one = good(Op::kDecode);
  one.qo_lens = {1};
  one.kv_lens = {19};
  Problem problem(GetParam(), one, rng_);
  for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{-5}, kMost, -kMost - 1}) {
    Arguments a = arguments(problem);
    a.q.row_stride = a.out.row_stride = stride;
    problem.poison_outputs();
    ASSERT_NO_THROW(call(Op::kDecode, a)) << stride;
    problem.fetch_outputs();
    EXPECT_TRUE(problem.check()) << stride;
  }
}

// --- append_kv
// -------------------------------------------------------------------------------------------------------------

TEST_P(BadTensor, AppendIntoMemoryThatIsShared) {
  Problem problem(GetParam(), good(Op::kDecode), rng_);
  TestTensor k(GetParam(), DType::kBFloat16, 3, 2, 64, Spacing::kContiguous);
  TestTensor v(GetParam(), DType::kBFloat16, 3, 2, 64, Spacing::kContiguous);
  k.fill_normal(rng_);
  v.fill_normal(rng_);
  const Expected share{Reason::kTensorStride, {"kv.", "stride", "share memory"}};
  const Expected overlap{Reason::kTensorOverlap, {"kv.v overlaps kv.k"}};
  const std::vector<Fault> faults{
      {"k and v one", [](Arguments& a) { a.kv.v = a.kv.k; }, overlap},
      {"v one head behind k", [](Arguments& a) { a.kv.v = at(a.kv.k, 64 * 2); }, overlap},
      {"v half a head behind k", [](Arguments& a) { a.kv.v = at(a.kv.k, 32 * 2); }, overlap},
      {"v in the last page of k", [](Arguments& a) { a.kv.v = at(a.kv.k, (a.kv.num_pages - 1) * 2048 * 2); }, overlap},
      {"pages that overlap", [](Arguments& a) { a.kv.k_stride.page = 1024; }, share},
      {"tokens that overlap", [](Arguments& a) { a.kv.v_stride.token = 64; }, share},
      {"heads that are tokens", [](Arguments& a) { a.kv.v_stride.head = a.kv.v_stride.token; }, share},
      {"k from the cache",
       [](Arguments& a) { a.k.data = at(a.kv.k, 512); },
       {Reason::kTensorOverlap, {"kv.k overlaps k"}}},
      {"v from the cache's k", [](Arguments& a) { a.v.data = a.kv.k; }, {Reason::kTensorOverlap, {"kv.k overlaps v"}}},
      {"v from the cache's v",
       [](Arguments& a) { a.v.data = at(a.kv.v, 4096); },
       {Reason::kTensorOverlap, {"kv.v overlaps v"}}},
      {"a scale in the cache",
       [](Arguments& a) {
         if (a.kv.device == kCpuDevice) static_cast<float*>(a.kv.v)[0] = static_cast<float*>(a.kv.v)[1] = 1.0F;
         a.kv.k_head_scale = static_cast<const float*>(a.kv.v);
       },
       {Reason::kTensorOverlap, {"kv.v overlaps kv.k_head_scale"}}},
      {"k of no type", [](Arguments& a) { a.k.dtype = kNoType; }, {Reason::kTensorDType, {"k is DType(77)"}}},
      {"v of no type", [](Arguments& a) { a.v.dtype = kNoType; }, {Reason::kTensorDType, {"v is DType(77)"}}},
      {"kv of no type", [](Arguments& a) { a.kv.dtype = kNoType; }, {Reason::kTensorDType, {"kv is DType(77)"}}},
  };
  for (const Fault& fault : faults) {
    Arguments a = arguments(problem);
    a.k = k.device();
    a.v = v.device();
    fault.spoil(a);
    const WorkspaceStats before = workspace_->stats();
    expect_error("append with " + fault.name, fault.expected, [&] {
      workspace_->append_kv(a.k, a.v, std::vector<std::int32_t>{0, 1, 3}, a.kv, a.table);
    });
    EXPECT_TRUE(unchanged(before, workspace_->stats())) << fault.name;
    if (fault.name == "a scale in the cache") problem.cache().upload();
    EXPECT_TRUE(problem.cache().device_matches_host()) << "append with " << fault.name;
  }
  EXPECT_TRUE(problem.grow(*workspace_, 1));
  EXPECT_TRUE(problem.cache().device_matches_host());
}

TEST_P(GoodTensor, KAndVMayInterleaveAtEveryAxis) {
  for (const CacheLayout layout : kAllLayouts) {
    Case c = good(Op::kDecode);
    c.layout = layout;
    Problem problem(GetParam(), c, rng_);
    EXPECT_TRUE(problem.grow(*workspace_, 2));
    EXPECT_TRUE(problem.cache().device_matches_host());
  }
  // By token and by head: [page, token, 2, head, dim] and [page, token, head, 2, dim].
  constexpr std::int64_t kPages = 3;
  constexpr std::int64_t kTokens = 4;
  constexpr std::int64_t kHeads = 2;
  constexpr std::int64_t kDim = 16;
  const PageTable table = PageTable::from_csr(kTokens, kPages, std::vector<std::int32_t>{0, 2},
                                              std::vector<std::int32_t>{2, 0}, std::vector<std::int32_t>{3});
  for (const std::int64_t between : {kHeads * kDim, kDim}) {
    Mirror<float> memory(GetParam(), std::vector<float>(kPages * kTokens * 2 * kHeads * kDim, -1.0F));
    KvCache kv = KvCache::contiguous(memory.device(), memory.device() + between, DType::kFloat32, KvLayout::kNHD,
                                     kPages, kTokens, kHeads, kDim, 0, GetParam());
    kv.k_stride = kv.v_stride = {
        .page = kTokens * 2 * kHeads * kDim, .token = 2 * kHeads * kDim, .head = between == kDim ? 2 * kDim : kDim};
    TestTensor k(GetParam(), DType::kFloat32, 7, kHeads, kDim, Spacing::kContiguous);
    TestTensor v(GetParam(), DType::kFloat32, 7, kHeads, kDim, Spacing::kContiguous);
    k.fill_normal(rng_);
    v.fill_normal(rng_);
    ASSERT_NO_THROW(workspace_->append_kv(k.device(), v.device(), std::vector<std::int32_t>{0, 7}, kv, table));
    memory.download();
    for (std::int64_t token = 0; token < 7; ++token) {
      const std::int64_t page = token < kTokens ? 2 : 0;
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const std::int64_t slot =
            page * kv.k_stride.page + token % kTokens * kv.k_stride.token + head * kv.k_stride.head;
        for (std::int64_t d = 0; d < kDim; ++d) {
          ASSERT_EQ(memory.host()[static_cast<std::size_t>(slot + d)], k.at(token, head, d));
          ASSERT_EQ(memory.host()[static_cast<std::size_t>(slot + between + d)], v.at(token, head, d));
        }
      }
    }
  }
}

TEST_P(GoodTensor, AttentionReadsKeysThatAreValues) {
  // One latent a token, as multi-head latent attention stores it: V is the front of K.
  constexpr std::int32_t kTokens = 21;
  Mirror<float> latent(GetParam(), std::vector<float>(2 * 16 * 64));
  for (float& x : latent.host()) x = rng_.normal();
  latent.upload();
  TestTensor q(GetParam(), DType::kFloat32, 1, 4, 64, Spacing::kContiguous);
  q.fill_normal(rng_);
  TestTensor out(GetParam(), DType::kFloat32, 1, 4, 32, Spacing::kContiguous);
  KvCache kv = KvCache::contiguous(latent.device(), latent.device(), DType::kFloat32, KvLayout::kNHD, 2, 16, 1, 64, 32,
                                   GetParam());
  kv.v_stride = kv.k_stride;
  const PageTable table = PageTable::from_csr(16, 2, std::vector<std::int32_t>{0, 2}, std::vector<std::int32_t>{0, 1},
                                              std::vector<std::int32_t>{kTokens - 16});
  workspace_->decode(q.device(), kv, table,
                     {.num_qo_heads = 4, .num_kv_heads = 1, .head_dim_qk = 64, .head_dim_vo = 32}, out.device());
  out.download();
  for (std::int64_t head = 0; head < 4; ++head) {
    std::vector<double> weights;
    double sum = 0.0;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      double logit = 0.0;
      for (std::int64_t d = 0; d < 64; ++d) {
        logit += static_cast<double>(q.at(0, head, d)) *
                 static_cast<double>(latent.host()[static_cast<std::size_t>(t * 64 + d)]);
      }
      weights.push_back(std::exp(logit / 8.0));
      sum += weights.back();
    }
    for (std::int64_t d = 0; d < 32; ++d) {
      double expected = 0.0;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        expected += weights[static_cast<std::size_t>(t)] / sum *
                    static_cast<double>(latent.host()[static_cast<std::size_t>(t * 64 + d)]);
      }
      ASSERT_TRUE(Tolerance::of(DType::kFloat32).admits(expected, static_cast<double>(out.at(0, head, d))));
    }
  }
  const std::vector<std::int32_t> one{0, 1};
  TestTensor k(GetParam(), DType::kFloat32, 1, 1, 64, Spacing::kContiguous);
  TestTensor v(GetParam(), DType::kFloat32, 1, 1, 32, Spacing::kContiguous);
  expect_error("append to it", {Reason::kTensorOverlap, {"kv.v overlaps kv.k"}},
               [&] { workspace_->append_kv(k.device(), v.device(), one, kv, table); });
}

// --- merge_states
// ----------------------------------------------------------------------------------------------------------

TEST_P(BadTensor, MergeIntoMemoryThatIsShared) {
  constexpr std::int64_t kRows = 4;
  constexpr std::int64_t kHeads = 3;
  TestTensor a(GetParam(), DType::kFloat32, kRows, kHeads, 16, Spacing::kContiguous);
  TestTensor b(GetParam(), DType::kFloat32, 2 * kRows, kHeads, 16, Spacing::kContiguous);  // room to be run into
  TestTensor out(GetParam(), DType::kFloat32, kRows, kHeads, 16, Spacing::kContiguous);
  a.fill_normal(rng_);
  b.fill_normal(rng_);
  Mirror<float> lse(GetParam(), std::vector<float>(2 * kRows * kHeads * 16, 0.5F));
  Mirror<float> merged(GetParam(), std::vector<float>(kRows * kHeads + 1));
  struct Merge {
    std::vector<PartialState> parts;
    Tensor out;
    float* lse = nullptr;
  };
  const FaultOf<Merge> kFaults[] = {
      {"rows that overlap",
       [](Merge& m) { m.out.row_stride = 32; },
       {Reason::kTensorStride, {"out", "row", "32", "48", "share memory"}}},
      {"heads that overlap",
       [](Merge& m) {
         m.out.row_stride = 16;
         m.out.head_stride = 63;
       },
       {Reason::kTensorStride, {"out", "head", "63", "64", "share memory"}}},
      {"out a row into a part",
       [](Merge& m) { m.out.data = at(m.parts[1].out.data, 48 * 4); },
       {Reason::kTensorOverlap, {"out overlaps a part's out"}}},
      {"out in a part's lse",
       [](Merge& m) { m.out.data = const_cast<float*>(m.parts[0].lse); },
       {Reason::kTensorOverlap, {"out overlaps a part's lse"}}},
      {"lse in out",
       [](Merge& m) { m.lse = static_cast<float*>(m.out.data) + 5; },
       {Reason::kTensorOverlap, {"lse overlaps out"}}},
      {"lse in a part",
       [](Merge& m) { m.lse = static_cast<float*>(const_cast<void*>(m.parts[1].out.data)); },
       {Reason::kTensorOverlap, {"lse overlaps a part's out"}}},
      {"lse one into a part's",
       [](Merge& m) { m.lse = const_cast<float*>(m.parts[0].lse) + 1; },
       {Reason::kTensorOverlap, {"lse overlaps a part's lse"}}},
      {"lse off its alignment",
       [](Merge& m) { m.lse = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(m.lse) + 2); },
       {Reason::kTensorAlignment, {"lse", "4"}}},
      {"all of no type",
       [](Merge& m) {
         m.out.dtype = kNoType;
         for (PartialState& part : m.parts) part.out.dtype = kNoType;
       },
       {Reason::kTensorDType, {"out is DType(77)"}}},
      {"a part of no type",
       [](Merge& m) { m.parts[1].out.dtype = kNoType; },
       {Reason::kTensorDType, {"DType(77)", "float32"}}},
  };
  for (const FaultOf<Merge>& fault : kFaults) {
    Merge m{.parts = {{.out = a.device(), .lse = lse.device()}, {.out = b.device(), .lse = lse.device()}},
            .out = out.device(),
            .lse = merged.device()};
    m.parts[1].out.rows = kRows;
    const Merge intact = m;
    fault.spoil(m);
    out.poison();
    const WorkspaceStats before = workspace_->stats();
    expect_error("merge with " + fault.name, fault.expected, [&] { workspace_->merge_states(m.parts, m.out, m.lse); });
    EXPECT_TRUE(unchanged(before, workspace_->stats())) << fault.name;
    out.download();
    EXPECT_TRUE(out.all_nan()) << fault.name;
    workspace_->merge_states(intact.parts, intact.out, intact.lse);
    out.download();
    for (std::int64_t d = 0; d < 16; ++d) {
      EXPECT_NEAR(out.at(3, 2, d), 0.5F * (a.at(3, 2, d) + b.at(3, 2, d)), 1e-5F) << fault.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, BadTensor, testing::ValuesIn(compiled_devices()), device_test_name);
INSTANTIATE_TEST_SUITE_P(Backends, BadTensorOnHost, testing::Values(kCpuDevice), device_test_name);
INSTANTIATE_TEST_SUITE_P(Backends, GoodTensor, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
