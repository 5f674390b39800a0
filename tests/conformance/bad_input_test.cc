// Bad input: every call says which argument is wrong, with its value and what was expected, before it writes anything;
// and the next good call works.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/bad_call.h"
#include "support/problem.h"

namespace fiw::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kHuge = std::int64_t{1} << 61;

// --- page tables, on the host
// ----------------------------------------------------------------------------------------------

struct Csr {
  std::int32_t page_size = 16;
  std::int64_t num_pages = 10;
  std::vector<std::int32_t> indptr{0, 2, 3};
  std::vector<std::int32_t> indices{7, 1, 4};
  std::vector<std::int32_t> last_page_len{3, 16};
  std::vector<std::int32_t> kv_lens{};

  PageTable build() const { return PageTable::from_csr(page_size, num_pages, indptr, indices, last_page_len, kv_lens); }
};

TEST(BadTable, EachFaultIsNamed) {
  const FaultOf<Csr> kFaults[] = {
      {"last 0",
       [](Csr& t) { t.last_page_len[1] = 0; },
       {Reason::kLastPageLen, {"request 1", "last_page_len", "0", "16"}, Status::kInvalidArgument, 1}},
      {"last 17",
       [](Csr& t) { t.last_page_len[0] = 17; },
       {Reason::kLastPageLen, {"request 0", "17", "16"}, Status::kInvalidArgument, 0}},
      {"last -3",
       [](Csr& t) { t.last_page_len[0] = -3; },
       {Reason::kLastPageLen, {"request 0", "-3", "16"}, Status::kInvalidArgument, 0}},
      {"indptr decreases",
       [](Csr& t) {
         t.indptr = {0, 2, 1};
       },
       {Reason::kIndptrDecreasing, {"indptr[2]", "1", "2"}, Status::kInvalidArgument, 1}},
      {"indptr starts at 1",
       [](Csr& t) {
         t.indptr = {1, 2, 3};
       },
       {Reason::kIndptrStart, {"indptr[0]", "1", "0"}}},
      {"indptr of length 2",
       [](Csr& t) {
         t.indptr = {0, 2};
       },
       {Reason::kIndptrLength, {"indptr", "2", "3"}}},
      {"no indptr", [](Csr& t) { t.indptr = {}; }, {Reason::kIndptrLength, {"indptr", "0", "3"}}},
      {"indices of length 2",
       [](Csr& t) {
         t.indices = {7, 1};
       },
       {Reason::kIndicesLength, {"indices", "2", "3"}}},
      {"indices of length 4",
       [](Csr& t) {
         t.indices = {7, 1, 4, 5};
       },
       {Reason::kIndicesLength, {"indices", "4", "3"}}},
      {"index 10",
       [](Csr& t) { t.indices[2] = 10; },
       {Reason::kPageIndex, {"request 1", "page 10", "10"}, Status::kInvalidArgument, 1}},
      {"index -1",
       [](Csr& t) { t.indices[1] = -1; },
       {Reason::kPageIndex, {"request 0", "-1", "10"}, Status::kInvalidArgument, 0}},
      {"kv_lens disagree",
       [](Csr& t) {
         t.kv_lens = {19, 15};
       },
       {Reason::kKvLens, {"request 1", "16", "15"}, Status::kInvalidArgument, 1}},
      {"kv_lens too short", [](Csr& t) { t.kv_lens = {19}; }, {Reason::kBatch, {"kv_lens", "1", "2"}}},
      {"page size 0", [](Csr& t) { t.page_size = 0; }, {Reason::kPageSize, {"page_size", "0", "1"}}},
      {"page size -16", [](Csr& t) { t.page_size = -16; }, {Reason::kPageSize, {"page_size", "-16", "1"}}},
      {"num_pages -1", [](Csr& t) { t.num_pages = -1; }, {Reason::kTableSize, {"num_pages", "-1", "0"}}},
      {"more tokens than int32 holds",
       [](Csr& t) {
         t.page_size = 1 << 30;
         t.indptr = {0, 0, 3};
       },
       {Reason::kTableSize, {"request 1", "2147483664", "int32"}, Status::kInvalidArgument, 1}},
  };
  EXPECT_EQ(Csr{}.build().kv_lens()[0], 19);
  for (const FaultOf<Csr>& fault : kFaults) {
    Csr table;
    fault.spoil(table);
    expect_error(fault.name, fault.expected, [&] { table.build(); });
  }
}

TEST(BadTable, BuildersAndAdvance) {
  const std::vector<std::vector<std::int32_t>> pages{{7, 1}, {4}};
  const auto from_pages = [&](std::vector<std::int32_t> kv_lens) { PageTable::from_pages(16, 10, pages, kv_lens); };
  expect_error("too few pages", {Reason::kKvLens, {"request 0", "2", "33"}, Status::kInvalidArgument, 0}, [&] {
    from_pages({33, 16});
  });
  from_pages({16, 16});  // pages reserved ahead are left out
  expect_error("negative length", {Reason::kKvLens, {"kv_lens[1]", "-1", "0"}, Status::kInvalidArgument, 1}, [&] {
    from_pages({20, -1});
  });
  expect_error("batch", {Reason::kBatch, {"2", "1"}}, [&] { from_pages({20}); });
  const BlockTable blocks{.page_size = 16, .max_pages = 2, .blocks = {7, 1, 4, -1}, .kv_lens = {20, 17}};
  expect_error("padding used", {Reason::kPageIndex, {"request 1", "-1", "10"}, Status::kInvalidArgument, 1},
               [&] { PageTable::from_block_table(blocks, 10); });

  PageTable table = PageTable::from_pages(16, 10, pages, std::vector<std::int32_t>{31, 16});
  const PageTable before = table;
  expect_error("no page given", {Reason::kNewPages, {"new_pages", "0"}, Status::kInvalidArgument, 1},
               [&] { table.advance(1); });
  expect_error("too many pages", {Reason::kNewPages, {"new_pages", "2", "1"}}, [&] {
    table.advance(1, std::vector<std::int32_t>{2, 3});
  });
  expect_error("page outside", {Reason::kPageIndex, {"request 1", "10"}, Status::kInvalidArgument, 1},
               [&] { table.advance(1, std::vector<std::int32_t>{10}); });
  expect_error("backwards", {Reason::kNewPages, {"-1", "0"}, Status::kInvalidArgument, 0}, [&] { table.advance(-1); });
  EXPECT_EQ(table, before) << "a failed advance must leave the table as it was";
}

// --- calls
// -----------------------------------------------------------------------------------------------------------------

std::vector<Fault> faults_of_params() {
  return {
      {"7 heads over 2",
       [](Arguments& a) { a.params.num_qo_heads = 7; },
       {Reason::kHeadCount, {"num_qo_heads", "7", "2"}}},
      {"no heads", [](Arguments& a) { a.params.num_qo_heads = 0; }, {Reason::kHeadCount, {"num_qo_heads", "0", "1"}}},
      {"no kv heads",
       [](Arguments& a) { a.params.num_kv_heads = 0; },
       {Reason::kHeadCount, {"num_kv_heads", "0", "1"}}},
      {"-2 kv heads",
       [](Arguments& a) { a.params.num_kv_heads = -2; },
       {Reason::kHeadCount, {"num_kv_heads", "-2", "1"}}},
      {"head_dim_qk 100",
       [](Arguments& a) { a.params.head_dim_qk = 100; },
       {Reason::kHeadDim, {"head_dim_qk", "100", "multiple of 8"}, Status::kUnsupported}},
      {"head_dim_qk 0",
       [](Arguments& a) { a.params.head_dim_qk = 0; },
       {Reason::kHeadDim, {"head_dim_qk", "0"}, Status::kUnsupported}},
      {"head_dim_qk 584",
       [](Arguments& a) { a.params.head_dim_qk = 584; },
       {Reason::kHeadDim, {"head_dim_qk", "584", "576"}, Status::kUnsupported}},
      {"head_dim_vo 20",
       [](Arguments& a) { a.params.head_dim_vo = 20; },
       {Reason::kHeadDim, {"head_dim_vo", "20", "multiple of 8"}, Status::kUnsupported}},
      {"head_dim_vo -8",
       [](Arguments& a) { a.params.head_dim_vo = -8; },
       {Reason::kHeadDim, {"head_dim_vo", "-8"}, Status::kUnsupported}},
      {"sm_scale NaN", [](Arguments& a) { a.params.sm_scale = kNan; }, {Reason::kScale, {"sm_scale", "nan"}}},
      {"sm_scale inf", [](Arguments& a) { a.params.sm_scale = kInf; }, {Reason::kScale, {"sm_scale", "inf"}}},
      {"sm_scale 3e38",
       [](Arguments& a) { a.params.sm_scale = 3e38F; },
       {Reason::kScale, {"sm_scale", "3e+38", "1e+30"}}},
      {"window -2", [](Arguments& a) { a.params.window_left = -2; }, {Reason::kWindow, {"window_left", "-2", "-1"}}},
      {"soft cap -1",
       [](Arguments& a) { a.params.logits_soft_cap = -1.0F; },
       {Reason::kSoftCap, {"logits_soft_cap", "-1", "0"}}},
      {"soft cap NaN",
       [](Arguments& a) { a.params.logits_soft_cap = kNan; },
       {Reason::kSoftCap, {"logits_soft_cap", "nan"}}},
      {"soft cap inf",
       [](Arguments& a) { a.params.logits_soft_cap = kInf; },
       {Reason::kSoftCap, {"logits_soft_cap", "inf"}}},
  };
}

std::vector<Fault> faults_of_q_and_out() {
  return {
      {"q of fp8",
       [](Arguments& a) { a.q.dtype = DType::kFloat8E4M3; },
       {Reason::kDTypeCombination, {"q", "float8_e4m3", "float32"}, Status::kUnsupported}},
      {"a q row too many", [](Arguments& a) { a.q.rows += 1; }, {Reason::kTensorShape, {"q has", "rows", "expected"}}},
      {"a q row too few", [](Arguments& a) { a.q.rows -= 1; }, {Reason::kTensorShape, {"q has", "rows", "expected"}}},
      {"q of 6 heads", [](Arguments& a) { a.q.heads = 6; }, {Reason::kTensorShape, {"q has 6 heads", "8"}}},
      {"q of 32 elements", [](Arguments& a) { a.q.dim = 32; }, {Reason::kTensorShape, {"q has 32", "64"}}},
      {"q null", [](Arguments& a) { a.q.data = nullptr; }, {Reason::kTensorNull, {"q is null"}}},
      {"q on CUDA device 7", [](Arguments& a) { a.q.device = 7; }, {Reason::kTensorDevice, {"q is on", "device 7"}}},
      {"q with overlapping heads",
       [](Arguments& a) { a.q.head_stride = 63; },
       {Reason::kTensorStride, {"q:", "head", "63", "64"}}},
      {"q with a negative row stride",
       [](Arguments& a) { a.q.row_stride = -512; },
       {Reason::kTensorStride, {"q:", "row", "-512"}}},
      {"q reaching past int64",
       [](Arguments& a) { a.q.row_stride = std::numeric_limits<std::int64_t>::max(); },
       {Reason::kSizeOverflow, {"q", "int64"}}},
      {"q reaching past int64 in bytes only",
       [](Arguments& a) { a.q.head_stride = 2 * kHuge / 7; },
       {Reason::kSizeOverflow, {"q", "int64"}}},
      {"q misaligned",
       [](Arguments& a) { a.q.data = static_cast<const std::byte*>(a.q.data) + 1; },
       {Reason::kTensorAlignment, {"q is at address", "2"}}},
      {"out null", [](Arguments& a) { a.out.data = nullptr; }, {Reason::kTensorNull, {"out is null"}}},
      {"out of another type",
       [](Arguments& a) { a.out.dtype = DType::kFloat16; },
       {Reason::kTensorDType, {"out is float16", "bfloat16"}}},
      {"out with a row too few", [](Arguments& a) { a.out.rows -= 1; }, {Reason::kTensorShape, {"out has", "rows"}}},
      {"out of 128 elements", [](Arguments& a) { a.out.dim = 128; }, {Reason::kTensorShape, {"out has 128", "64"}}},
      {"out on CUDA device 3",
       [](Arguments& a) { a.out.device = 3; },
       {Reason::kTensorDevice, {"out is on", "device 3"}}},
      {"out with overlapping rows",
       [](Arguments& a) { a.out.row_stride = 1; },
       {Reason::kTensorStride, {"out:", "row", "1"}}},
      {"out overlapping q",
       [](Arguments& a) { a.out.data = const_cast<void*>(a.q.data); },
       {Reason::kTensorOverlap, {"out overlaps q"}}},
      {"out overlapping the end of q",
       [](Arguments& a) { a.q.data = static_cast<std::byte*>(a.out.data) + 2 * 64; },
       {Reason::kTensorOverlap, {"out overlaps q"}}},
  };
}

std::vector<Fault> faults_of_cache() {
  return {
      {"kv on CUDA device 7", [](Arguments& a) { a.kv.device = 7; }, {Reason::kTensorDevice, {"kv is on", "device 7"}}},
      {"k null", [](Arguments& a) { a.kv.k = nullptr; }, {Reason::kTensorNull, {"kv.k is null"}}},
      {"v null", [](Arguments& a) { a.kv.v = nullptr; }, {Reason::kTensorNull, {"kv.v is null"}}},
      {"another page size", [](Arguments& a) { a.kv.page_size = 8; }, {Reason::kPageSize, {"page_size", "8", "16"}}},
      {"too few pages",
       [](Arguments& a) { a.kv.num_pages = a.table.max_page_index(); },
       {Reason::kPageIndex, {"page", "kv has"}, Status::kInvalidArgument, kAnyIndex}},
      {"other kv heads", [](Arguments& a) { a.kv.num_kv_heads = 1; }, {Reason::kTensorShape, {"kv has 1 heads", "2"}}},
      {"another key head dim",
       [](Arguments& a) { a.kv.head_dim_qk = 32; },
       {Reason::kTensorShape, {"kv.k has 32", "64"}}},
      {"another value head dim",
       [](Arguments& a) { a.kv.head_dim_vo = 32; },
       {Reason::kTensorShape, {"kv.v has 32", "64"}}},
      {"token stride 63",
       [](Arguments& a) { a.kv.k_stride.token = 63; },
       {Reason::kTensorStride, {"kv.k", "token", "63", "64"}}},
      {"head stride 8",
       [](Arguments& a) { a.kv.v_stride.head = 8; },
       {Reason::kTensorStride, {"kv.v", "head", "8", "64"}}},
      {"page stride -1",
       [](Arguments& a) { a.kv.v_stride.page = -1; },
       {Reason::kTensorStride, {"kv.v", "page", "-1"}}},
      {"pages reaching past int64",
       [](Arguments& a) { a.kv.k_stride.page = kHuge; },
       {Reason::kSizeOverflow, {"kv.k", "int64"}}},
      {"k_scale NaN", [](Arguments& a) { a.kv.k_scale = kNan; }, {Reason::kScale, {"k_scale", "nan"}}},
      {"v_scale inf", [](Arguments& a) { a.kv.v_scale = kInf; }, {Reason::kScale, {"v_scale", "inf"}}},
      {"k_scale 0", [](Arguments& a) { a.kv.k_scale = 0.0F; }, {Reason::kScale, {"k_scale", "0"}}},
      {"v_scale -1", [](Arguments& a) { a.kv.v_scale = -1.0F; }, {Reason::kScale, {"v_scale", "-1"}}},
  };
}

std::vector<Fault> faults_of_indptr(const std::string& name, std::vector<std::int32_t> Arguments::*indptr) {
  return {
      {name + " of length 2",
       [=](Arguments& a) {
         (a.*indptr) = {0, 2};
       },
       {Reason::kQoIndptr, {name, "2", "3"}}},
      {name + " of length 4",
       [=](Arguments& a) { (a.*indptr).push_back((a.*indptr).back()); },
       {Reason::kQoIndptr, {name, "4", "3"}}},
      {name + " starting at 1",
       [=](Arguments& a) { (a.*indptr)[0] = 1; },
       {Reason::kQoIndptr, {name + "[0]", "1", "0"}}},
      {name + " decreasing",
       [=](Arguments& a) { (a.*indptr)[1] = (a.*indptr)[2] + 1; },
       {Reason::kQoIndptr, {"request 1", name + "[2]", name + "[1]"}, Status::kInvalidArgument, 1}},
  };
}

TEST_P(BadCall, Params) {
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged})
    expect_refused(good(op), faults_of_params());
}

TEST_P(BadCall, QueriesAndOutput) {
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
    expect_refused(good(op), faults_of_q_and_out());
  }
}

TEST_P(BadCall, Cache) {
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify}) expect_refused(good(op), faults_of_cache());
}

TEST_P(BadCall, QueryIndptr) {
  expect_refused(good(Op::kPrefill), faults_of_indptr("qo_indptr", &Arguments::qo_indptr));
  // A ragged batch is what qo_indptr says, so a wrong length of it shows as a wrong length of kv_indptr.
  expect_refused(good(Op::kRagged), faults_of_indptr("kv_indptr", &Arguments::kv_indptr));
  expect_refused(
      good(Op::kRagged),
      {{"no qo_indptr", [](Arguments& a) { a.qo_indptr.clear(); }, {Reason::kQoIndptr, {"qo_indptr", "empty"}}}});
}

TEST_P(BadCall, VerifyWindow) {
  expect_refused(
      good(Op::kVerify),
      {
          {"window 0", [](Arguments& a) { a.window = 0; }, {Reason::kQoIndptr, {"window", "0", "64"}}},
          {"window -1", [](Arguments& a) { a.window = -1; }, {Reason::kQoIndptr, {"window", "-1", "64"}}},
          {"window 65", [](Arguments& a) { a.window = 65; }, {Reason::kQoIndptr, {"window", "65", "64"}}},
          {"window 3 for q of 2", [](Arguments& a) { a.window = 3; }, {Reason::kTensorShape, {"q has 4 rows", "6"}}},
      });
}

TEST_P(BadCall, RaggedKeysAndValues) {
  expect_refused(
      good(Op::kRagged),
      {
          {"k null", [](Arguments& a) { a.k.data = nullptr; }, {Reason::kTensorNull, {"k is null"}}},
          {"v null", [](Arguments& a) { a.v.data = nullptr; }, {Reason::kTensorNull, {"v is null"}}},
          {"k a row short", [](Arguments& a) { a.k.rows -= 1; }, {Reason::kTensorShape, {"k has 34 rows", "35"}}},
          {"v of 3 heads", [](Arguments& a) { a.v.heads = 3; }, {Reason::kTensorShape, {"v has 3 heads", "2"}}},
          {"v of another type",
           [](Arguments& a) { a.v.dtype = DType::kFloat16; },
           {Reason::kTensorDType, {"v is float16", "bfloat16"}}},
          {"k and v of fp8",
           [](Arguments& a) { a.k.dtype = a.v.dtype = DType::kFloat8E4M3; },
           {Reason::kDTypeCombination, {"k is float8_e4m3"}, Status::kUnsupported}},
          {"k on CUDA device 1",
           [](Arguments& a) { a.k.device = 1; },
           {Reason::kTensorDevice, {"k is on", "device 1"}}},
      });
}

TEST_P(BadCall, HalfAMask) {
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
    Case masked = good(op);
    masked.mask = true;
    expect_refused(masked,
                   {{"no mask_indptr",
                     [](Arguments& a) { a.extras.mask_indptr = nullptr; },
                     {Reason::kMask, {"mask_indptr", "null"}}},
                    {"no mask", [](Arguments& a) { a.extras.mask = nullptr; }, {Reason::kMask, {"mask", "null"}}}});
  }
}

/// What lies behind the pointers is checked where the host can read it.
class BadHostMemory : public BadCall {};

TEST_P(BadHostMemory, Mask) {
  static constexpr std::int32_t kShort[] = {0, 1, 100};
  static constexpr std::int32_t kNegative[] = {-8, 8, 100};
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
    Case masked = good(op);
    masked.mask = true;
    expect_refused(masked, {{"too few mask bytes",
                             [](Arguments& a) { a.extras.mask_indptr = kShort; },
                             {Reason::kMask, {"request 0", "mask_indptr", "1 bytes"}, Status::kInvalidArgument, 0}},
                            {"a negative mask offset",
                             [](Arguments& a) { a.extras.mask_indptr = kNegative; },
                             {Reason::kMask, {"request 0", "mask_indptr", "-8"}, Status::kInvalidArgument, 0}}});
  }
}

TEST_P(BadHostMemory, Slopes) {
  static constexpr float kInfinite[] = {1.0F, -kInf, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F};
  static constexpr float kNanSlope[] = {kNan, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F};
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
    Case c = good(op);
    c.alibi = true;
    expect_refused(c, {{"an infinite slope",
                        [](Arguments& a) { a.extras.alibi_slopes = kInfinite; },
                        {Reason::kAlibi, {"alibi_slopes[1]", "-inf", "finite"}}},
                       {"a NaN slope",
                        [](Arguments& a) { a.extras.alibi_slopes = kNanSlope; },
                        {Reason::kAlibi, {"alibi_slopes[0]", "nan", "finite"}}}});
  }
}

TEST_P(BadHostMemory, HeadScales) {
  static constexpr float kNanScale[] = {1.0F, kNan};
  static constexpr float kZeroScale[] = {0.0F, 1.0F};
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify}) {
    expect_refused(good(op), {{"a NaN among k_head_scale",
                               [](Arguments& a) { a.kv.k_head_scale = kNanScale; },
                               {Reason::kScale, {"k_head_scale", "nan"}}},
                              {"a zero among v_head_scale",
                               [](Arguments& a) { a.kv.v_head_scale = kZeroScale; },
                               {Reason::kScale, {"v_head_scale", "0"}}}});
  }
}

TEST_P(BadCall, TableOfAnotherBatch) {
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify}) {
    const Reason reason = op == Op::kPrefill ? Reason::kQoIndptr : Reason::kTensorShape;
    expect_refused(good(op), {{"a table of 3 requests",
                               [](Arguments& a) {
                                 a.table = PageTable::from_csr(16, 5, std::vector<std::int32_t>{0, 1, 1, 2},
                                                               std::vector<std::int32_t>{0, 1},
                                                               std::vector<std::int32_t>{1, 0, 1});
                               },
                               {reason, {"expected"}}}});
  }
}

TEST_P(BadCall, StepThatDiffersFromItsPlan) {
  Case c = good(Op::kDecode);
  c.lse = false;
  Problem problem(GetParam(), c, rng_);
  const AttentionStep step = problem.plan(*workspace_);
  const std::vector<Fault> faults{
      {"lse", [&](Arguments& a) { a.lse = problem.unasked_lse(); }, {Reason::kStepMismatch, {"lse", "without"}}},
      {"sinks",
       [](Arguments& a) {
         static constexpr float kSinks[8] = {};
         a.extras.sinks = kSinks;
       },
       {Reason::kSinks, {"sinks", "given", "without"}}},
      {"alibi slopes",
       [](Arguments& a) {
         static constexpr float kSlopes[8] = {};
         a.extras.alibi_slopes = kSlopes;
       },
       {Reason::kAlibi, {"alibi_slopes", "given", "without"}}},
      {"q and out of fp16",
       [](Arguments& a) { a.q.dtype = a.out.dtype = DType::kFloat16; },
       {Reason::kTensorDType, {"q is float16", "bfloat16"}}},
      {"kv of fp16",
       [](Arguments& a) { a.kv.dtype = DType::kFloat16; },
       {Reason::kTensorDType, {"kv is float16", "bfloat16"}}},
      {"q of 16 heads", [](Arguments& a) { a.q.heads = 16; }, {Reason::kTensorShape, {"q has 16 heads", "8"}}},
      {"q of 3 rows", [](Arguments& a) { a.q.rows = 3; }, {Reason::kTensorShape, {"q has 3 rows", "2"}}},
  };
  for (const Fault& fault : faults) {
    problem.poison_outputs();
    Arguments spoilt = arguments(problem);
    fault.spoil(spoilt);
    const WorkspaceStats before = workspace_->stats();
    expect_error(fault.name, fault.expected,
                 [&] { step.run(spoilt.q, spoilt.kv, spoilt.out, spoilt.lse, spoilt.extras); });
    EXPECT_TRUE(unchanged(before, workspace_->stats())) << fault.name;
    problem.fetch_outputs();
    EXPECT_TRUE(problem.outputs_untouched()) << fault.name;
    problem.run(step);
    EXPECT_TRUE(problem.check()) << "after " << fault.name;
  }
  c.sinks = true;
  Problem with_sinks(GetParam(), c, rng_);
  const AttentionStep sinks_step = with_sinks.plan(*workspace_);
  expect_error("no sinks", {Reason::kSinks, {"sinks", "null", "with"}}, [&] {
    sinks_step.run(with_sinks.q().device(), with_sinks.cache().device(), with_sinks.out().device());
  });
  expect_error("a step never planned", {Reason::kStepMismatch, {"never planned"}}, [&] {
    DecodeStep().run(with_sinks.q().device(), with_sinks.cache().device(), with_sinks.out().device());
  });
}

TEST_P(BadCall, Append) {
  Problem problem(GetParam(), good(Op::kDecode), rng_);
  TestTensor k(GetParam(), DType::kBFloat16, 3, 2, 64, Spacing::kContiguous);
  TestTensor v(GetParam(), DType::kBFloat16, 3, 2, 64, Spacing::kContiguous);
  k.fill_normal(rng_);
  v.fill_normal(rng_);
  const auto append = [&](const Arguments& a) { workspace_->append_kv(a.k, a.v, a.qo_indptr, a.kv, a.table); };
  std::vector<Fault> faults = faults_of_cache();
  // An append has no planned heads to differ from: what must match is k and v.
  std::erase_if(faults, [](const Fault& f) { return f.expected.reason == Reason::kTensorShape; });
  for (Fault& fault : faults_of_indptr("append_indptr", &Arguments::qo_indptr)) faults.push_back(std::move(fault));
  const std::vector<Fault> own{
      {"more tokens than the request has",
       [](Arguments& a) {
         a.qo_indptr = {0, 0, 17};
       },
       {Reason::kTensorShape, {"k has 3 rows", "17"}}},
      {"17 tokens into 16",
       [](Arguments& a) {
         a.qo_indptr = {0, 0, 17};
         a.k.rows = a.v.rows = 17;
         a.k.row_stride = a.v.row_stride = 128;
       },
       {Reason::kBatch, {"request 1", "17", "16"}, Status::kInvalidArgument, 1}},
      {"k of fp8",
       [](Arguments& a) { a.k.dtype = DType::kFloat8E4M3; },
       {Reason::kDTypeCombination, {"k is float8_e4m3"}, Status::kUnsupported}},
      {"v of another type",
       [](Arguments& a) { a.v.dtype = DType::kFloat32; },
       {Reason::kTensorDType, {"v is float32", "bfloat16"}}},
      {"k of 1 head", [](Arguments& a) { a.k.heads = 1; }, {Reason::kTensorShape, {"k has 1 heads", "2"}}},
      {"v null", [](Arguments& a) { a.v.data = nullptr; }, {Reason::kTensorNull, {"v is null"}}},
      {"k on CUDA device 7", [](Arguments& a) { a.k.device = 7; }, {Reason::kTensorDevice, {"k is on", "device 7"}}},
  };
  faults.insert(faults.end(), own.begin(), own.end());
  for (const Fault& fault : faults) {
    Arguments a = arguments(problem);
    a.k = k.device();
    a.v = v.device();
    a.qo_indptr = {0, 1, 3};
    fault.spoil(a);
    expect_error("append with " + fault.name, fault.expected, [&] { append(a); });
    EXPECT_TRUE(problem.cache().device_matches_host()) << "append with " << fault.name;
  }
  EXPECT_TRUE(problem.grow(*workspace_, 1));
  EXPECT_TRUE(problem.cache().device_matches_host());
}

TEST_P(BadCall, Merge) {
  TestTensor a(GetParam(), DType::kFloat32, 2, 3, 16, Spacing::kContiguous);
  TestTensor b(GetParam(), DType::kFloat32, 2, 3, 16, Spacing::kContiguous);
  TestTensor out(GetParam(), DType::kFloat32, 2, 3, 16, Spacing::kContiguous);
  a.fill_normal(rng_);
  b.fill_normal(rng_);
  const Mirror<float> lse(GetParam(), std::vector<float>(6, 0.5F));
  struct MergeArguments {
    std::vector<PartialState> parts;
    Tensor out;
  };
  const FaultOf<MergeArguments> kFaults[] = {
      {"no parts", [](MergeArguments& m) { m.parts.clear(); }, {Reason::kPartialStates, {"parts", "1"}}},
      {"rows differ",
       [](MergeArguments& m) { m.parts[1].out.rows = 1; },
       {Reason::kTensorShape, {"part", "1 rows", "2"}}},
      {"heads differ",
       [](MergeArguments& m) { m.parts[0].out.heads = 4; },
       {Reason::kTensorShape, {"part", "4 heads", "3"}}},
      {"dims differ", [](MergeArguments& m) { m.parts[0].out.dim = 8; }, {Reason::kTensorShape, {"part", "8", "16"}}},
      {"types differ",
       [](MergeArguments& m) { m.parts[1].out.dtype = DType::kBFloat16; },
       {Reason::kTensorDType, {"part", "bfloat16", "float32"}}},
      {"lse null", [](MergeArguments& m) { m.parts[1].lse = nullptr; }, {Reason::kTensorNull, {"lse", "null"}}},
      {"part null", [](MergeArguments& m) { m.parts[0].out.data = nullptr; }, {Reason::kTensorNull, {"part", "null"}}},
      {"out null", [](MergeArguments& m) { m.out.data = nullptr; }, {Reason::kTensorNull, {"out", "null"}}},
      {"out of fp8",
       [](MergeArguments& m) { m.out.dtype = DType::kFloat8E5M2; },
       {Reason::kDTypeCombination, {"out", "float8_e5m2"}, Status::kUnsupported}},
      {"out on CUDA device 7",
       [](MergeArguments& m) { m.out.device = 7; },
       {Reason::kTensorDevice, {"out", "device 7"}}},
      {"out shifted into a part",
       [](MergeArguments& m) { m.out.data = static_cast<std::byte*>(const_cast<void*>(m.parts[0].out.data)) + 64; },
       {Reason::kTensorOverlap, {"out overlaps"}}},
  };
  for (const FaultOf<MergeArguments>& fault : kFaults) {
    MergeArguments m{.parts = {{.out = a.device(), .lse = lse.device()}, {.out = b.device(), .lse = lse.device()}},
                     .out = out.device()};
    const MergeArguments intact = m;
    fault.spoil(m);
    expect_error("merge with " + fault.name, fault.expected, [&] { workspace_->merge_states(m.parts, m.out); });
    workspace_->merge_states(intact.parts, intact.out);
    out.download();
    for (std::int64_t row = 0; row < 2; ++row) {
      for (std::int64_t head = 0; head < 3; ++head) {
        for (std::int64_t d = 0; d < 16; ++d) {
          EXPECT_NEAR(out.at(row, head, d), 0.5F * (a.at(row, head, d) + b.at(row, head, d)), 1e-5F) << fault.name;
        }
      }
    }
  }
}

TEST_P(BadCall, ClosedWorkspace) {
  Problem problem(GetParam(), good(Op::kDecode), rng_);
  const AttentionStep step = problem.plan(*workspace_);
  EXPECT_NE(workspace_->handle(), nullptr);
  workspace_->close();
  workspace_->close();
  EXPECT_TRUE(workspace_->closed());
  EXPECT_EQ(workspace_->handle(), nullptr);
  workspace_->invalidate_runtime_cache();
  workspace_->invalidate_prefill_runtime_cache();
  workspace_->invalidate_verify_runtime_cache();

  const Expected closed{Reason::kClosedWorkspace, {"closed"}, Status::kClosed};
  problem.poison_outputs();
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
    Problem other(GetParam(), good(op), rng_);
    expect_error("a call", closed, [&] { other.call(*workspace_); });
    if (op != Op::kRagged) expect_error("planning", closed, [&] { other.plan(*workspace_); });
  }
  expect_error("a step", closed, [&] {
    step.run(problem.q().device(), problem.cache().device(), problem.out().device(), problem.device_lse());
  });
  expect_error("append_kv", closed, [&] { problem.grow(*workspace_, 0); });
  TestTensor state(GetParam(), DType::kFloat32, 1, 1, 8, Spacing::kContiguous);
  const Mirror<float> lse(GetParam(), std::vector<float>{0.0F});
  expect_error("merge_states", closed, [&] {
    const std::vector<PartialState> parts{{.out = state.device(), .lse = lse.device()}};
    workspace_->merge_states(parts, state.device());
  });
  problem.fetch_outputs();
  EXPECT_TRUE(problem.outputs_untouched());
}

TEST(BadWorkspace, DevicesAndOptions) {
  expect_error("device -2", {Reason::kDeviceMissing, {"device_index", "-2"}, Status::kNoDevice},
               [] { FlashInferWorkspace::create(-2); });
  if (!FlashInferWorkspace::compiled_with(DeviceKind::kCuda)) {
    EXPECT_EQ(FlashInferWorkspace::create(0), nullptr);
    EXPECT_EQ(FlashInferWorkspace::create(7, std::size_t{1} << 20), nullptr);
  }
  const auto create = [](const WorkspaceOptions& options) { FlashInferWorkspace::create(kCpuDevice, options); };
  expect_error("threads -1", {Reason::kOptions, {"num_threads", "-1"}}, [&] { create({.num_threads = -1}); });
  expect_error("no cache entries", {Reason::kOptions, {"cache_entries", "0", "1"}},
               [&] { create({.cache_entries = 0}); });
  expect_error("cache entries 1025", {Reason::kOptions, {"cache_entries", "1025", "1024"}},
               [&] { create({.cache_entries = 1025}); });
  expect_error("split of 0 tokens", {Reason::kOptions, {"fixed_split_tokens", "0", "1"}},
               [&] { create({.plan = {.batch_invariant = true, .fixed_split_tokens = 0}}); });
  expect_error("half an allocator", {Reason::kOptions, {"allocator"}}, [&] {
    create({.allocator = {.allocate = [](void*, std::size_t, std::size_t, Stream) -> void* { return nullptr; }}});
  });
  expect_error("limits without heads", {Reason::kHeadCount, {"num_qo_heads", "0"}},
               [&] { create({.limits = WorkspaceLimits{}}); });
  const Allocator empty{.allocate = [](void*, std::size_t, std::size_t, Stream) -> void* { return nullptr; },
                        .free = [](void*, void*, std::size_t, Stream) {}};
  expect_error("no memory", {Reason::kAllocation, {"bytes"}, Status::kOutOfMemory},
               [&] { create({.allocator = empty}); });
}

INSTANTIATE_TEST_SUITE_P(Backends, BadCall, testing::ValuesIn(compiled_devices()), device_test_name);
INSTANTIATE_TEST_SUITE_P(Backends, BadHostMemory, testing::Values(kCpuDevice), device_test_name);

}  // namespace
}  // namespace fiw::test
