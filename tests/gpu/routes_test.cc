// Which kernel family serves a call: the table is host code, so this needs no device.
#include "cuda/routes.h"

#include <gtest/gtest.h>

#include "core/work.h"
#include "fiw/error.h"

namespace fiw::cuda {
namespace {

using enum KernelFamily;

/// One request of `rows` queries over `kv_len` keys in pages of 16, on an H200.
RouteRequest prefill(std::int64_t rows, std::int64_t kv_len) {
  return {.spec = {.params = {.num_qo_heads = 32, .num_kv_heads = 8, .head_dim_qk = 128, .head_dim_vo = 128}},
          .page_size = 16,
          .max_qo_len = static_cast<std::int32_t>(rows),
          .total_rows = rows,
          .total_kv = kv_len,
          .batch = 1};
}

RouteRequest decode(std::int32_t num_kv_heads) {
  RouteRequest request = prefill(64, 0);
  request.spec.params.num_kv_heads = num_kv_heads;
  request.max_qo_len = 1;
  request.batch = 64;
  return request;
}

KernelFamily route(const RouteRequest& request, CudaRoute choice = CudaRoute::kTable) {
  return choose_family(request, DeviceProps::h200(), choice);
}

TEST(CudaRoutes, FewRowsTakeOurOwnKernel) {
  for (const std::int32_t kv_heads : {1, 8, 32}) EXPECT_EQ(route(decode(kv_heads)), kCudaStream);
  EXPECT_EQ(route(decode(8), CudaRoute::kCore), kCudaCore);
  EXPECT_EQ(route(decode(32), CudaRoute::kTile), kTensorTile);
  EXPECT_EQ(route(decode(8), CudaRoute::kHopper), kCudaStream) << "nothing that FA3 serves: the table decides";

  const auto window = [](std::int64_t tokens, std::int32_t heads_a_group, auto&& change) {
    RouteRequest request = prefill(tokens, 4096);
    request.spec.params.num_qo_heads = 8 * heads_a_group;
    change(request);
    return request;
  };
  const auto unchanged = [](RouteRequest&) {};
  EXPECT_EQ(route(window(8, 4, unchanged)), kCudaStream);
  EXPECT_EQ(route(window(9, 4, unchanged)), kTensorTile) << "36 rows";
  EXPECT_EQ(route(window(4, 7, unchanged)), kCudaStream);
  EXPECT_EQ(route(window(5, 7, unchanged)), kTensorTile);
  EXPECT_EQ(route(window(8, 4, [](auto& r) { r.graph = true; })), kCudaStream);
  EXPECT_EQ(route(window(8, 4,
                         [](auto& r) {
                           r.batch = 2;
                           r.total_rows = 9;
                           r.graph = true;
                         })),
            kTensorTile)
      << "windows of several lengths have no grid of their own";
  EXPECT_EQ(route(window(8, 4, [](auto& r) { r.surplus_queries = true; })), kCudaStream);
  EXPECT_EQ(route(window(8, 4, [](auto& r) { r.any_qo_len = true; })), kTensorTile);
  EXPECT_EQ(route(window(8, 4, [](auto& r) { r.spec.custom_mask = true; })), kTensorTile);
  EXPECT_EQ(route(window(8, 4, [](auto& r) { r.paged = false; })), kTensorTile);
}

TEST(CudaRoutes, OlderDevicesDecodeByFlashInfersKernels) {
  DeviceProps ampere = DeviceProps::h200();
  ampere.compute_capability = 80;
  const auto on_ampere = [&](const RouteRequest& request) { return choose_family(request, ampere, CudaRoute::kTable); };
  EXPECT_EQ(on_ampere(decode(8)), kTensorTile);
  EXPECT_EQ(on_ampere(decode(32)), kCudaCore);
  RouteRequest few_keys = decode(8);
  few_keys.decode_pages = 256;
  EXPECT_EQ(on_ampere(few_keys), kCudaCore);
  few_keys.spec.params.num_qo_heads = 64;
  EXPECT_EQ(on_ampere(few_keys), kTensorTile) << "eight heads a group";
}

TEST(CudaRoutes, LongPrefillTakesOurOwnKernel) {
  EXPECT_EQ(route(prefill(32768, 32768)), kPrefill);
  EXPECT_EQ(route(prefill(512, 32768)), kPrefill);
  EXPECT_EQ(route(prefill(512, 512)), kPrefill);
  EXPECT_EQ(route(prefill(16, 8192)), kTensorTile);
  EXPECT_EQ(route(prefill(128, 8192)), kPrefill) << "cut keys";
  EXPECT_EQ(route(prefill(16, 8192), CudaRoute::kPrefill), kPrefill);
  const auto changed = [](auto&& change) {
    RouteRequest request = prefill(8192, 8192);
    change(request);
    return request;
  };
  EXPECT_EQ(route(changed([](auto& r) { r.surplus_queries = true; })), kPrefill);
  EXPECT_EQ(route(changed([](auto& r) { r.spec.params.window_left = 4095; })), kPrefill);
  EXPECT_EQ(route(changed([](auto& r) { r.spec.params.logits_soft_cap = 50; })), kPrefill);
  EXPECT_EQ(route(changed([](auto& r) { r.spec.sinks = true; })), kPrefill);
  EXPECT_EQ(route(changed([](auto& r) { r.paged = false; })), kPrefill);
  const auto not_ours = [&](auto&& change) {
    EXPECT_NE(route(changed(change)), kPrefill);
    EXPECT_NE(route(changed(change), CudaRoute::kPrefill), kPrefill);
  };
  EXPECT_EQ(route(changed([](auto& r) { r.page_size = 8; })), kPrefill) << "copied together";
  not_ours([](auto& r) {
    r.page_size = 8;
    r.scratch_limit = 1 << 20;
  });
  not_ours([](auto& r) { r.spec.kv_dtype = DType::kFloat16; });
  not_ours([](auto& r) { r.graph = true; });
  not_ours([](auto& r) { r.any_qo_len = true; });
  not_ours([](auto& r) { r.spec.alibi = true; });
  not_ours([](auto& r) { r.spec.custom_mask = true; });
  not_ours([](auto& r) { r.total_kv = 0; });
  not_ours([](auto& r) { r.total_kv = std::int64_t{1} << 25; });
}

TEST(CudaRoutes, PrefillsThatTheFullSetServes) {
  RouteRequest narrow = prefill(8192, 8192);
  narrow.spec.kv_dtype = DType::kFloat8E4M3;
  RouteRequest unequal = prefill(8192, 8192);
  unequal.spec.params.head_dim_qk = 192;
  try {
    EXPECT_EQ(route(narrow), kPrefill) << "copied together";
    EXPECT_EQ(route(unequal), kHopper);
  } catch (const Error& error) {
    GTEST_SKIP() << "skipped: " << error.what();
  }
}

TEST(CudaRoutes, OtherPrefillsTakeHopper) {
  EXPECT_EQ(route(prefill(8192, 8192), CudaRoute::kHopper), kHopper);
  EXPECT_EQ(route(prefill(16, 8192), CudaRoute::kHopperPaged), kHopperPaged);
  RouteRequest ragged = prefill(8192, 8192);
  ragged.paged = false;
  EXPECT_EQ(route(ragged, CudaRoute::kHopper), kHopper);
  EXPECT_EQ(route(ragged, CudaRoute::kHopperPaged), kPrefill) << "no pages";
  DeviceProps ampere = DeviceProps::h200();
  ampere.compute_capability = 80;
  EXPECT_EQ(choose_family(prefill(8192, 8192), ampere, CudaRoute::kHopper), kTensorTile);
}

TEST(CudaRoutes, SmallPagesAreCopiedTogetherWhereThatFits) {
  RouteRequest request = prefill(8192, 8192);
  request.page_size = 1;
  EXPECT_EQ(route(request), kPrefill);
  EXPECT_EQ(route(request, CudaRoute::kHopper), kHopper);
  request.scratch_limit = gather_bytes(request.spec, request.total_kv) - 1;
  EXPECT_EQ(route(request), kHopperPaged);
  EXPECT_EQ(route(request, CudaRoute::kHopper), kTensorTile);
  request.page_size = 8;
  EXPECT_EQ(route(request), kHopperPaged);

  RouteRequest window = prefill(1024, 65536);
  window.page_size = 1;
  window.spec.params.window_left = 4095;
  EXPECT_EQ(route(window), kHopperPaged) << "most of what would be copied is not read";
}

TEST(CudaRoutes, WhatHopperCannotServeTakesOtherKernels) {
  const auto changed = [](auto&& change) {
    RouteRequest request = prefill(8192, 8192);
    change(request);
    return request;
  };
  for (const CudaRoute choice : {CudaRoute::kTable, CudaRoute::kHopper, CudaRoute::kHopperPaged}) {
    EXPECT_NE(route(changed([](auto& r) { r.spec.params.window_left = 4095; }), choice), kTensorTile);
    EXPECT_NE(route(changed([](auto& r) { r.spec.params.logits_soft_cap = 50; }), choice), kTensorTile);
    EXPECT_NE(route(changed([](auto& r) { r.spec.sinks = true; }), choice), kTensorTile);
    EXPECT_NE(route(changed([](auto& r) { r.spec.params.causal = false; }), choice), kTensorTile);
    EXPECT_EQ(route(changed([](auto& r) {
                      r.spec.params.causal = false;
                      r.spec.params.window_left = 4095;
                    }),
                    choice),
              kPrefill);
    EXPECT_EQ(route(changed([](auto& r) { r.spec.alibi = true; }), choice), kTensorTile);
    EXPECT_EQ(route(changed([](auto& r) { r.spec.custom_mask = true; }), choice), kTensorTile);
    EXPECT_EQ(route(changed([](auto& r) { r.surplus_queries = true; }), choice), kPrefill);
    EXPECT_EQ(route(changed([](auto& r) { r.graph = true; }), choice), kTensorTile);
    EXPECT_EQ(route(changed([](auto& r) { r.any_qo_len = true; }), choice), kTensorTile);
  }
}

}  // namespace
}  // namespace fiw::cuda
