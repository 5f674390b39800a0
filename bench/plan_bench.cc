// How long planning takes: it stands between the scheduler and the first kernel of every step.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "plan/planner.h"

namespace fiw {
namespace {

std::vector<std::int32_t> random_pages(std::size_t batch, std::int32_t most) {
  std::mt19937 engine(1);
  std::uniform_int_distribution<std::int32_t> pages(1, most);
  std::vector<std::int32_t> result(batch);
  for (std::int32_t& value : result) value = pages(engine);
  return result;
}

WorkLoad llama_heads() {
  return {.num_qo_heads = 32, .num_kv_heads = 8, .head_dim_qk = 128, .head_dim_vo = 128, .page_size = 16};
}

void plan_split(benchmark::State& state, KernelFamily family, const DeviceProps& device, const WorkLoad& work) {
  std::vector<std::byte> memory(shape_schedule(family, device, work, {}).bytes);
  for (auto _ : state) {
    const ScheduleShape shape = shape_schedule(family, device, work, {});
    write_schedule(shape, work, memory);
    benchmark::ClobberMemory();
    state.counters["items"] = shape.items;
  }
}

// One decode step; lengths are even, random, or short but for one request of 100,000 tokens.
enum Lengths : std::int64_t { kEven, kRandom, kOneLong };
void decode_step(benchmark::State& state, KernelFamily family, const DeviceProps& device) {
  const auto batch = static_cast<std::size_t>(state.range(0));
  std::vector<std::int32_t> pages = random_pages(batch, state.range(1) == kRandom ? 512 : 20);
  if (state.range(1) == kEven) pages.assign(batch, 256);
  if (state.range(1) == kOneLong) pages[batch / 2] = 6250;
  WorkLoad work = llama_heads();
  work.kv_pages = pages;
  plan_split(state, family, device, work);
}

void prefill_chunk(benchmark::State& state) {
  const auto batch = static_cast<std::size_t>(state.range(0));
  const std::vector<std::int32_t> pages = random_pages(batch, 512);
  std::vector<std::int32_t> qo_indptr{0};
  for (const std::int32_t count : pages) qo_indptr.push_back(qo_indptr.back() + count * 2);
  WorkLoad work = llama_heads();
  work.kv_pages = pages;
  work.qo_indptr = qo_indptr;
  plan_split(state, KernelFamily::kTensorTile, DeviceProps::h200(), work);
}

// Prompts of random lengths or, where the third argument says so, all of `tokens`.
void hopper_prefill(benchmark::State& state, KernelFamily family) {
  const auto batch = static_cast<std::size_t>(state.range(0));
  const auto tokens = static_cast<std::int32_t>(state.range(1));
  std::vector<std::int32_t> kv_lens = random_pages(batch, 2 * tokens);
  if (state.range(2) == kEven) kv_lens.assign(batch, tokens);
  std::vector<std::int32_t> indptr{0};
  for (const std::int32_t length : kv_lens) indptr.push_back(indptr.back() + length);
  WorkLoad work = llama_heads();
  work.kv_pages = kv_lens;
  work.qo_indptr = indptr;
  const DeviceProps device = DeviceProps::h200();
  std::vector<std::byte> scratch;
  const std::int32_t rows = hopper_tile_rows(family, device, work, {});
  std::vector<std::byte> memory(shape_hopper(family, rows, device, work, {}).bytes);
  for (auto _ : state) {
    const HopperShape shape = shape_hopper(family, rows, device, work, {});
    write_hopper(family, rows, shape, device, work, indptr, kv_lens, scratch, memory);
    benchmark::ClobberMemory();
    state.counters["works"] = shape.works;
  }
}

void decode_lengths(benchmark::internal::Benchmark* bench) {
  bench->ArgsProduct({{1, 64, 256}, {kEven, kRandom, kOneLong}});
}

void prompt_lengths(benchmark::internal::Benchmark* bench) {
  bench->ArgsProduct({{8, 64}, {64, 256, 2048}, {kRandom}})->Args({256, 4096, kRandom})->Args({16, 2048, kEven});
}

BENCHMARK_CAPTURE(decode_step, cpu_stream, KernelFamily::kCpuStream, DeviceProps::cpu(2))->Apply(decode_lengths);
BENCHMARK_CAPTURE(decode_step, cuda_core, KernelFamily::kCudaCore, DeviceProps::h200())->Apply(decode_lengths);
BENCHMARK_CAPTURE(decode_step, tensor_tile, KernelFamily::kTensorTile, DeviceProps::h200())->Apply(decode_lengths);
BENCHMARK_CAPTURE(decode_step, cuda_stream, KernelFamily::kCudaStream, DeviceProps::h200())->Apply(decode_lengths);
BENCHMARK(prefill_chunk)->Arg(1)->Arg(16)->Arg(64);
BENCHMARK_CAPTURE(hopper_prefill, fa3, KernelFamily::kHopper)->Apply(prompt_lengths);
BENCHMARK_CAPTURE(hopper_prefill, own, KernelFamily::kPrefill)->Apply(prompt_lengths);

}  // namespace
}  // namespace fiw
