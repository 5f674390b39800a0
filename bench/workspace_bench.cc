// What planning a decode step costs the caller: a new plan, and one that is found in the cache.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "fiw/workspace.h"

namespace {

constexpr std::int32_t kPageSize = 16;

/// Requests of 1000 to 5000 tokens, the first one longer by `more`.
fiw::PageTable make_table(std::int32_t batch, std::int32_t more) {
  std::vector<std::int32_t> kv_lens(batch);
  std::vector<std::vector<std::int32_t>> pages(batch);
  std::int32_t used = 0;
  for (std::int32_t r = 0; r < batch; ++r) {
    kv_lens[r] = 1000 + r * 7919 % 4000 + (r == 0 ? more : 0);
    pages[r].resize((kv_lens[r] + kPageSize - 1) / kPageSize);
    std::iota(pages[r].begin(), pages[r].end(), used);
    used += static_cast<std::int32_t>(pages[r].size());
  }
  return fiw::PageTable::from_pages(kPageSize, used, pages, kv_lens);
}

fiw::StepSpec llama_spec() { return {.params = {.num_qo_heads = 32, .num_kv_heads = 8, .head_dim_qk = 128}}; }

void plan_decode_hit(benchmark::State& state) {
  const auto workspace = fiw::FlashInferWorkspace::create(fiw::kCpuDevice);
  const fiw::PageTable table = make_table(static_cast<std::int32_t>(state.range(0)), 0);
  const fiw::StepSpec spec = llama_spec();
  workspace->plan_decode(table, spec);
  for (auto _ : state) benchmark::DoNotOptimize(workspace->plan_decode(table, spec));
  if (workspace->stats().decode.misses != 1) state.SkipWithError("a look-up missed");
}

/// One entry and two tables that take turns: each call plans anew and replaces the other's plan.
void plan_decode_miss(benchmark::State& state) {
  const auto workspace = fiw::FlashInferWorkspace::create(fiw::kCpuDevice, fiw::WorkspaceOptions{.cache_entries = 1});
  const auto batch = static_cast<std::int32_t>(state.range(0));
  const fiw::PageTable tables[] = {make_table(batch, 0), make_table(batch, kPageSize)};
  const fiw::StepSpec spec = llama_spec();
  std::size_t turn = 0;
  for (auto _ : state) benchmark::DoNotOptimize(workspace->plan_decode(tables[turn++ % 2], spec));
  if (workspace->stats().decode.hits != 0) state.SkipWithError("a look-up hit");
}

BENCHMARK(plan_decode_hit)->Arg(8)->Arg(64)->Arg(256);
BENCHMARK(plan_decode_miss)->Arg(8)->Arg(64)->Arg(256);

}  // namespace
