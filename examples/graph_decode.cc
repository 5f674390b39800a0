// Decode steps that are captured once and replayed while requests grow, on the CPU, where a replay calls the body
// again.
#include <cstdio>
#include <vector>

#include "fiw/graph.h"

int main() {
  constexpr int kHeads = 8, kKvHeads = 2, kDim = 64, kPageSize = 16, kPages = 32, kLayers = 4, kMaxBatch = 4;
  const auto workspace = fiw::FlashInferWorkspace::create(fiw::kCpuDevice);
  const auto f32 = fiw::DType::kFloat32;

  // The addresses are captured, so they stay; every one of them holds the largest batch.
  std::vector<float> q(kMaxBatch * kHeads * kDim, 1.0F), out(q.size()), k(kPages * kPageSize * kKvHeads * kDim),
      v(k.size()), new_k(kMaxBatch * kKvHeads * kDim), new_v(new_k.size());
  const auto kv =
      fiw::KvCache::contiguous(k.data(), v.data(), f32, fiw::KvLayout::kNHD, kPages, kPageSize, kKvHeads, kDim);

  const fiw::StepSpec layer{.params = {.num_qo_heads = kHeads, .num_kv_heads = kKvHeads, .head_dim_qk = kDim},
                            .q_dtype = f32,
                            .kv_dtype = f32};
  fiw::GraphSession graph = fiw::GraphSession::decode(
      *workspace, {&layer, 1},
      {.max_batch = kMaxBatch, .max_pages = kPages, .page_size = kPageSize, .num_pages = kPages});
  const fiw::Stream stream = nullptr;  // on CUDA one of the caller's own
  graph.capture(
      [&](int) {
        for (int i = 0; i < kLayers; ++i) {  // an engine has its own tensors, and its projections, in each layer
          graph.append_kv({new_k.data(), f32, kMaxBatch, kKvHeads, kDim},
                          {new_v.data(), f32, kMaxBatch, kKvHeads, kDim}, kv);
          graph.run({q.data(), f32, kMaxBatch, kHeads, kDim}, kv, {out.data(), f32, kMaxBatch, kHeads, kDim});
        }
      },
      stream);

  // Three requests of 30 tokens grow by one a step; each takes its next page when it needs one. A token's V is its
  // step's number, and those before the first step have 0.
  const std::vector<std::vector<int>> pages = {{0, 1}, {2, 3}, {4, 5}};
  auto table = fiw::PageTable::from_pages(kPageSize, kPages, pages, std::vector<int>{30, 30, 30});
  int next_page = 6;
  for (int step = 1; step <= 20; ++step) {
    std::vector<int> fresh(static_cast<std::size_t>(table.pages_needed(1)));
    for (int& page : fresh) page = next_page++;
    table.advance(1, fresh);
    new_v.assign(new_v.size(), static_cast<float>(step));
    graph.step(table, stream);
  }
  graph.check(stream);

  const fiw::GraphStats stats = graph.stats();
  std::printf("out %.2f; captures %d, replays %d, plans made %d, found %d\n", out[0], static_cast<int>(stats.captures),
              static_cast<int>(stats.replays), static_cast<int>(stats.plans), static_cast<int>(stats.plan_hits));
}
