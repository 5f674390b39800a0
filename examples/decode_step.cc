// One decode step of two requests through four layers: the first layer makes the plan, the others find it.
#include <cstdio>
#include <vector>

#include "fiw/workspace.h"

int main() {
  constexpr int kHeads = 8, kKvHeads = 2, kDim = 64, kPageSize = 16, kPages = 32, kLayers = 4;
  const auto workspace = fiw::FlashInferWorkspace::create(fiw::kCpuDevice);

  // Request 0 has 20 tokens, in pages 7 and 3; request 1 has 5, in page 9.
  const std::vector<std::vector<int>> pages = {{7, 3}, {9}};
  const auto table = fiw::PageTable::from_pages(kPageSize, kPages, pages, std::vector<int>{20, 5});
  const fiw::AttentionParams params{.num_qo_heads = kHeads, .num_kv_heads = kKvHeads, .head_dim_qk = kDim};

  // Keys of zero weigh all tokens alike, and V holds its page's number: out is the mean page number of a request.
  std::vector<float> q(2 * kHeads * kDim, 1.0F), out(q.size());
  std::vector<float> k(kPages * kPageSize * kKvHeads * kDim), v(k.size());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / (kPageSize * kKvHeads * kDim));

  for (int layer = 0; layer < kLayers; ++layer) {  // an engine has its own q, out, k and v in each layer
    const auto kv = fiw::KvCache::contiguous(k.data(), v.data(), fiw::DType::kFloat32, fiw::KvLayout::kNHD, kPages,
                                             kPageSize, kKvHeads, kDim);
    workspace->decode({q.data(), fiw::DType::kFloat32, 2, kHeads, kDim}, kv, table, params,
                      {out.data(), fiw::DType::kFloat32, 2, kHeads, kDim});
  }
  const fiw::CacheStats plans = workspace->stats().decode;
  std::printf("out %.2f and %.2f; plans made %d, found %d\n", out[0], out[kHeads * kDim],
              static_cast<int>(plans.misses), static_cast<int>(plans.hits));
}
